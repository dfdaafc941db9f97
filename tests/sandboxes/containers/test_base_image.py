"""Where the default image's packages come from: this machine's own sources, as apt writes them.

1. either way of writing; 2. what is not in use is left out; 3. the recipe's name changes with what the image is made
of.
"""

from sandboxes.containers.images import Mirror, apt_entries

ONE_LINE = """
# deb http://commented/debian bookworm main
deb [signed-by=/x.gpg] http://mirror/debian bookworm main contrib
deb-src http://mirror/debian bookworm main
"""
STANZAS = """
Types: deb
# a comment: with a colon
URIs: http://mirror/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb-src
URIs: http://mirror/source
Suites: bookworm
Components: main
"""


def test_one_line_sources() -> None:
    assert list(apt_entries(ONE_LINE, ".list")) == [("http://mirror/debian", "bookworm", ("main", "contrib"))]


def test_stanzas() -> None:
    expected = [("http://mirror/debian", suite, ("main",)) for suite in ("bookworm", "bookworm-updates")]
    assert list(apt_entries(STANZAS, ".sources")) == expected


def test_recipe_names_what_the_image_is_made_of() -> None:
    first, other = (Mirror(uri="http://a", suite=suite).recipe for suite in ("bookworm", "trixie"))
    assert first != other
    assert first == Mirror(uri="http://b", suite="bookworm").recipe
