"""What a Dockerfile may ask for.

1. the images that it builds upon, stages left out; 2. instructions, flags, directives and labels that are refused,
however they are written; 3. whatever is let through has known instructions alone; 4. what is built says on single lines
what was checked, also where readers differ about the end of a line.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import SandboxError
from sandboxes.containers.images import ALLOWED, as_read, images_of, instructions_of

STAGES = """
# a comment
FROM debian:12 AS build
RUN make \\
    # a comment between
    --quiet --mount
FROM other/image@sha256:{digest}
COPY --from=build --chown=1:1 /a /b
COPY\t--from=0 /a /b
COPY --from=third:1 /a /b
FROM build
""".replace("{digest}", "a" * 64)


def test_images_that_it_builds_upon() -> None:
    assert images_of(STAGES) == ["debian:12", f"other/image@sha256:{'a' * 64}", "third:1"]


@pytest.mark.parametrize(
    "line",
    [
        "VOLUME /x",
        "ADD http://host/file /x",
        "add . /x",
        "ONBUILD RUN true",
        "HEALTHCHECK CMD true",
        "EXPOSE 80",
        "RUN --mount=type=bind,source=/,target=/host true",
        "RUN --network=host true",
        "RUN --security=insecure true",
        "RUN \\\n --mount=type=ssh true",
        "run --device=/dev/kvm true",
        "COPY --link . /x",
        "COPY . /x --exclude=y",
        "FROM --platform=linux/arm64 debian",
        "FROM $IMAGE",
        "FROM ${IMAGE:-x}",
        "COPY --from=$X /a /b",
        "LABEL areal-agent.sandboxes.owner=me",
        "LABEL a=b \\\n areal-agent.sandboxes.lease=0",
        "RUN true \\",
        "RUN true \\\\\n\nVOLUME /x",
        "<<EOF",
    ],
)
def test_what_is_refused(line: str) -> None:
    with pytest.raises(SandboxError, match="Dockerfile"):
        images_of(f"FROM debian\n{line}")


@pytest.mark.parametrize("directive", ["# syntax=docker/dockerfile:1", "#escape=`", "# check=skip=all"])
def test_directives_are_refused(directive: str) -> None:
    with pytest.raises(SandboxError, match="directives"):
        images_of(f"{directive}\nFROM debian")


@pytest.mark.parametrize("text", ["", "# nothing", "RUN true"])
def test_image_must_be_named(text: str) -> None:
    with pytest.raises(SandboxError, match="FROM"):
        images_of(text)


lines = st.lists(st.sampled_from(["FROM a", "RUN x", "VOLUME y", "\\", "#", "--mount=z", "# syntax=q", "AD", "D u /v"]))


@given(lines.map("\n".join) | lines.map(" ".join) | st.text())
def test_what_is_let_through_has_known_instructions(text: str) -> None:
    try:
        images_of(text)
    except SandboxError:
        return
    assert {name for name, _ in instructions_of(text)} <= set(ALLOWED)


@pytest.mark.parametrize("space", ["", " ", "\t", "\u00a0", "\u3000", "\x1f"])
def test_what_is_built_is_what_was_checked(space: str) -> None:
    """An engine ends the line at a backslash with such a space behind it, and would see an ADD."""
    text = f"FROM debian\nRUN true \\{space}\nADD http://host/file /x"
    assert images_of(text) == ["debian"]
    assert as_read(text) == "FROM debian\nRUN true ADD http://host/file /x\n"
