"""Keys and values in pages, for GPUs (Kwon et al. 2023, arXiv 2309.06180): a row takes pages as it grows, and rows that
begin alike share them.
"""
