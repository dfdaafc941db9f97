"""What a program that a launcher runs finds in its environment, beside what its caller adds. It knows no backend."""

PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"


def base_environment(home: str) -> dict[str, str]:
    """`home`: the working directory, as the program sees it.

    >>> sorted(base_environment("/work"))
    ['HOME', 'PATH', 'TMPDIR']
    """
    return {"PATH": PROGRAM_PATH, "HOME": home, "TMPDIR": home}
