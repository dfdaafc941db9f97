"""The doctor, with a real vLLM server that it starts (slow): all is well, by either way that weights go."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRANSFERS = ("shared_memory", "distributed")

Doctor = tuple[subprocess.Popen[bytes], Path]
"""Its process, and the file with all that it says."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def doctors(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Doctor]]:
    """Two doctors at work, one per way of transfer, at once, because most of the time a server starts on one core."""
    command = (sys.executable, "-m", "areal_agent.doctor", "--config", "configs/quickstart_vllm.yaml")
    with ExitStack() as stack:
        started: dict[str, Doctor] = {}
        for transfer in TRANSFERS:
            folder = tmp_path_factory.mktemp(transfer)
            told = folder / "told"
            changes = (f"engine.python={vllm_python}", f"trainer.transfer={transfer}", f"run_dir={folder / 'run'}")
            with told.open("wb") as file:
                doctor = subprocess.Popen([*command, *changes], cwd=ROOT, stdout=file, stderr=file)
            stack.callback(_end, doctor)
            started[transfer] = (doctor, told)
        yield started


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_all_is_well(transfer: str, doctors: dict[str, Doctor]) -> None:
    doctor, told = doctors[transfer]
    assert doctor.wait(900) == 0, told.read_text()
    assert f"by {transfer.replace('_', ' ')}: published in" in told.read_text()


def _end(doctor: subprocess.Popen[bytes]) -> None:
    doctor.kill()
    doctor.wait()
