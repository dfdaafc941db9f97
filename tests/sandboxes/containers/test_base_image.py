"""The default image's recipe changes with what the image is made of, and its mirror is this machine's."""

from sandboxes.containers.images import mirror_of, recipe_of


def test_recipe_names_what_the_image_is_made_of() -> None:
    assert recipe_of("bookworm") == recipe_of("bookworm") != recipe_of("trixie")


def test_release_without_a_list_has_no_mirror() -> None:
    assert mirror_of("no-such-release") == []
