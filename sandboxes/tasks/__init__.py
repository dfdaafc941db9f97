"""Tasks as benchmarks ship them: a folder with an instruction, an image, tests that judge, and a solution."""
