"""Whatever reads what comes from outside takes a damaged or hostile file, or refuses it by its documented error:

1. any damage done to a valid file at random; 2. what is made to do harm, which is refused: nesting, huge numbers,
bombs, links, SQL that never ends, code that would run when it is loaded. None runs code, hangs, or takes memory out of
proportion.

The readers run in a process of their own, which says what it tries next, has a bound on its memory, and ends where a
case takes too long. `--hypothesis-profile=search`, as in .ci/full, does more and other damage each time.
"""

import asyncio
import base64
import faulthandler
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from areal_agent.cluster.local import read_described
from areal_agent.config import Config
from areal_agent.engine.foreign.weight_folders import AdapterForm, prove_adapter, prove_manifest, read_shapes
from areal_agent.errors import ArealAgentError, ConfigError, LedgerError, RequestError, SandboxError, WeightUpdateError
from areal_agent.files import MANIFEST, encode_manifest
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.images import ImageIntake
from areal_agent.images import ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading, require_intact
from areal_agent.ledger.snapshots import restore
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics
from areal_agent.observe.token_records import SeenTokens, TokenRecorder, read_seen
from areal_agent.rollout.config import TasksConfig
from areal_agent.rollout.tasks import load_tasks
from areal_agent.run.grading import RESULTS, compare
from areal_agent.sft.data import read_chats
from areal_agent.threads import cores_for
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import ChatTemplate
from areal_agent.tokens.vision import Vision
from areal_agent.trainer.checkpoint import TRAINING, read_checkpoint
from areal_agent.trainer.model import Policy
from areal_agent.trainer.state import PROGRESS, TrainingProgress
from sandboxes.cell import Archives
from sandboxes.containers.images import images_of
from sandboxes.folder import Entry, entries_in, entries_of, pack
from sandboxes.tasks.harbor import HarborTask, reported
from tests.ledger.record import record
from tests.vision import PROCESSOR, make_vision_model, picture

CASE_S = 60.0  # the longest time that a case may take; it takes milliseconds
SPARE_BYTES = 2**29  # that a reader may allocate
HARM = "harmed"
"""The file that code would make, if any ran."""

Change = Callable[[Path], object]


class Parser(NamedTuple):
    make: Change  # a valid folder
    damaged: str  # which of its files
    read: Change
    refuses: type[Exception] | tuple[type[Exception], ...]
    hostile: Mapping[str, str | bytes | Change]  # the content of the first such file, or what makes the folder hostile


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {HARM}",)


DEEP, LONG, PICKLE = "[" * 20_000, "9" * 5000, pickle.dumps(Harm())
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
CONFIG = "model: tiny\nworkflow: mine:solve\ntasks: {source: tasks.jsonl}\neval: {num_tasks: 0}\nsteps: 3\n"
TASK = {
    "task.toml": 'version = "1.0"\n[environment]\nmemory_mb = 512\nworkdir = "/app"\nenv = {A = "${B:-c}"}\n'
    '[agent]\ntimeout_sec = 10.5\n[verifier]\nenvironment_mode = "separate"\n',
    "instruction.md": "Do it.\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "environment/Dockerfile": "FROM x\nRUN true\nCOPY --chown=1 a \\\n  b\n",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] + '\\n' + m.content | trim }}{% endfor %}{{ tools | tojson(indent=2) }}"
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "weight": 1}]}\n'
SAMPLE = {"session_id": "s", "task_id": "t", "status": "completed", "reward": 1.0, "answer": "4", "num_tokens": 3,
          "num_turns": 1, "seconds": 0.5, "is_truncated": False}  # fmt: skip
RESULT = {"model": "m", "success_reward": 1.0, "scores": {"pass_at_1": {"mean": 1.0}}, "answers": [SAMPLE]}
VALUES = [None, True, -1, 0, 2**63, 2**200, 1e308, "", "x", "\0", "../../etc/passwd", [], {}, [[]], {"x": {}}, ["x"]]
PIECES = [b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"[", b"{", b'"', b"-", b"[" * 2000, LONG.encode(), b"1e999", b"NaN",
          b'"\\ud800"', b"null", b"{}", b"../../etc/passwd", b"&a", b"*a", b"!!timestamp x"]  # fmt: skip


MATRICES = {"layer.q.weight": (4, 4), "layer.k.weight": (4, 4)}
PICTURE = picture("red")
PICTURE_DIGEST = hashlib.sha256(PICTURE).hexdigest()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return a file with up to three damages, or JSON with another value."""
    if chance.random() < 0.5 and (changed := _with_another_value(data, chance)):
        return changed
    for _ in range(chance.randint(1, 3)):
        start, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        near = min(start + chance.randint(0, 8), len(data))
        flipped = bytes(byte ^ 1 << chance.randrange(8) for byte in data[start:near])
        piece = chance.choice(PIECES)
        rests = [b"", flipped + data[near:], data[end:], data[start:end] + data[start:], piece + data[near:]]
        data = data[:start] + chance.choice(rests)
    return data


def _with_another_value(data: bytes, chance: random.Random) -> bytes | None:
    try:
        rows = [json.loads(row) for row in (data.splitlines() if b"\n{" in data else [data])]
    except ValueError:
        return None
    places: list[tuple[Any, Any]] = []
    waiting = list(rows)
    while waiting:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        places += [(inner, key) for key in keys]
        waiting += [inner[key] for key in keys]
    if not places:
        return None
    inner, key = chance.choice(places)
    inner[key] = chance.choice(VALUES)
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def put(name: str, content: bytes | str, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))


def file(name: str, content: bytes | str) -> Change:
    return partial(put, name, content)


def files(texts: Mapping[str, bytes | str], **facts: object) -> Change:
    """Return what writes files, and a manifest of them if there are facts for it."""

    def make(folder: Path) -> None:
        for name, text in texts.items():
            put(name, text, folder)
        if facts:
            (folder / MANIFEST).write_bytes(encode_manifest(folder, facts))

    return make


def link(name: str, target: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).symlink_to(target))


def bomb(opening: str, closing: str, first: str) -> str:
    """Return YAML of thirty values, each of which holds the one before nine times."""
    rows = [f"a{n}: &a{n} {opening}{', '.join([f'*a{n - 1}'] * 9)}{closing}" for n in range(1, 30)]
    return "\n".join([f"a0: &a0 {first}", *rows])


def override(folder: Path) -> object:
    put("config.yaml", CONFIG, folder)
    return Config.load(folder / "config.yaml", [(folder / "override").read_bytes().decode(errors="replace")])


def read_tasks(suffix: str, folder: Path) -> object:
    return load_tasks(TasksConfig(source=str((folder / "t").rename(folder / f"t{suffix}"))), "train", 0)


def read_task_folder(folder: Path) -> object:
    HarborTask.load(folder, variables={"B": "c"})
    return [entries_in(folder / part) for part in ("tests", "environment")]


def read_reward(folder: Path) -> object:
    async def save(path: str, target: BinaryIO, max_bytes: int) -> None:
        target.write(pack([Entry(Path(path).name, (folder / Path(path).name).read_bytes())]))

    async def load(tar: BinaryIO | bytes, path: str) -> None:
        raise AssertionError("nothing is written")

    return asyncio.run(reported(Archives(save=save, load=load)))


def make_weights(folder: Path) -> None:
    for number in (1, 2):
        save_file({f"layer.{number}": torch.zeros(4, 4)}, folder / f"model-{number}.safetensors")
    index = {"weight_map": {f"layer.{number}": f"model-{number}.safetensors" for number in (1, 2)}}
    files({"model.safetensors.index.json": json.dumps(index)}, step=1)(folder)


def read_weights(folder: Path) -> object:
    return read_shapes(folder), prove_manifest(folder)


def make_adapter(folder: Path) -> None:
    form = AdapterForm(base=Path("base"), rank=2, alpha=4.0, target_modules=("q",))
    put("adapter_config.json", form.encode(), folder)
    shapes = form.shapes(MATRICES)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    files({}, step=1)(folder)


def read_adapter(folder: Path) -> object:
    return prove_adapter(folder, MATRICES), prove_manifest(folder)


def make_images(folder: Path) -> None:
    assert ImageFolder(folder / "images").keep(PICTURE) == PICTURE_DIGEST


def read_image(folder: Path) -> object:
    return ImageFolder(folder / "images").read(PICTURE_DIGEST)


def as_image(what: Change) -> Change:
    """Return what puts something else in the place of the image."""

    def change(folder: Path) -> None:
        (file := ImageFolder(folder / "images").file(PICTURE_DIGEST)).unlink()
        what(file)

    return change


def in_its_place(name: str, what: Change) -> Change:
    """Return what puts something else in the place of a file."""
    return lambda folder: ((folder / name).unlink(), what(folder / name))


def as_device(name: str) -> dict[str, Change]:
    """Return what puts a pipe and a device in the place of a file; reading one never ends."""
    return {"a pipe": in_its_place(name, os.mkfifo), "a device": link(name, "/dev/zero")}


def read_picture(folder: Path) -> object:
    """Take a picture as an agent's request brings it."""
    url = f"data:;base64,{base64.b64encode((folder / 'picture').read_bytes()).decode()}"
    intake = ImageIntake(vision_of(Path(sys.argv[2])), ImageFolder(folder / "images"), Limits())
    part = {"type": "image_url", "image_url": {"url": url}}
    return asyncio.run(intake.taken({"messages": [{"role": "user", "content": [part]}]}))


def read_processor(folder: Path) -> Vision:
    if (vision := Renderer.load(folder).vision()) is None:  # it gets no images, and a log line says why
        raise ConfigError("refused")
    return vision


vision_of = cache(read_processor)


def make_processor(folder: Path) -> None:
    shutil.copytree(sys.argv[2], folder, dirs_exist_ok=True)


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG file of these chunks, by kind and content."""
    made = [(len(data), kind + data) for kind, data in chunks]
    parts = [size.to_bytes(4, "big") + part + zlib.crc32(part).to_bytes(4, "big") for size, part in made]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def header(**fields: object) -> bytes:
    """Return a safetensors file without tensors."""
    return len(encoded := orjson.dumps(fields)).to_bytes(8, "little") + encoded


def read_model(folder: Path) -> object:
    read_described(folder)
    return cores_for(folder), Policy.load(folder, torch.device("cpu")), Renderer.load(folder)


def with_config(**changes: object) -> Change:
    def change(folder: Path) -> None:
        put("config.json", json.dumps(json.loads((folder / "config.json").read_text()) | changes), folder)
        put("code.py", f"import pathlib\npathlib.Path('{HARM}').touch()\n", folder)

    return change


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "safe")
    put("pytorch_model.bin", PICKLE, folder)


def read_template(folder: Path) -> object:
    template = ChatTemplate((folder / "chat.jinja").read_bytes().decode(errors="replace"), {})
    return template.render([{"role": "user", "content": "hi"}], [{"name": "f", "arguments": {}}])


def make_ledger(folder: Path) -> None:
    asyncio.run(record(folder / "ledger.sqlite"))


def read_ledger(folder: Path) -> None:
    verify(path := folder / "ledger.sqlite")
    with reading(path) as snapshot:
        questions.counts(snapshot)
        for session in ("trained", "leased", "forked", "unpaid", "open"):
            questions.recorded(snapshot, session)
    require_intact(path)


def sql(script: str, name: str = "ledger.sqlite") -> Change:
    def change(folder: Path) -> None:
        with closing(sqlite3.connect(folder / name)) as connection:
            connection.executescript(script)

    return change


def make_snapshot(folder: Path, change: Change = lambda folder: None) -> None:
    part = folder / "000001-000000"
    part.mkdir(exist_ok=True)
    if not (part / "ledger.sqlite").exists():
        make_ledger(part)
    change(part)
    (part / MANIFEST).write_bytes(encode_manifest(part, {"step": 1}))


def read_snapshot(folder: Path) -> object:
    (target := folder / "run").mkdir()
    return restore(folder, target / "ledger.sqlite", claimed=0)


def make_tokens(folder: Path) -> None:
    recorder, values = TokenRecorder(folder / "token_records", 1.0), np.arange(5, dtype=np.float32)
    for branch in (0, 1):
        recorder.add("a", branch, SeenTokens(values.astype(np.int32), values, values, values))
    recorder.write(1)


def arrays(**arrays: Any) -> Change:
    return lambda folder: np.savez(folder / "token_records" / "step_000001-0.npz", allow_pickle=True, **arrays)


# fmt: off
PARSERS = {
    "config": Parser(file("config.yaml", CONFIG), "*.yaml", lambda at: Config.load(at / "config.yaml"), ConfigError, {
        "lists": bomb("[", "]", "[x]") + "\nsteps: *a29", "merges": bomb("{<<: [", "]}", "{k: 1}"),
        "deep": f"steps: {DEEP}", "in itself": "steps: &a [*a]", "a mapping in itself": "&a\nengine: *a",
        "no timestamp": "steps: !!timestamp x", "code": f"model: !!python/object/apply:os.system ['touch {HARM}']",
        "a long integer": f"steps: {LONG}", "no date": "steps: 2001-99-99", "an empty integer": "steps: !!int ''",
        "no bool": "steps: !!bool x", "many keys": "\n".join(f"k{n}: 1" for n in range(3000)),
    }),
    "override": Parser(file("override", "steps=4"), "override", override, ConfigError, {
        "code": f"model=!!python/object/apply:os.system ['touch {HARM}']", "no date": "steps=2001-99-99",
        "a long integer": f"steps={LONG}", "deep": f"steps={DEEP}", "an empty integer": "steps=!!int ''",
        "a bomb": "tasks={" + bomb("[", "]", "[x]").replace("\n", ", ") + "}",
    }),
    "tasks": Parser(file("t", '{"id": "a", "n": 3}\n{"n": [1.5]}\n'), "*", partial(read_tasks, ".jsonl"), ConfigError, {
        "deep": DEEP, "deep with digits": "[" + "1" * 20 + "," + DEEP, "a long integer": LONG,
    }),
    "parquet": Parser(lambda at: pq.write_table(pa.table({"n": list(range(100))}), at / "t"), "*",
        partial(read_tasks, ".parquet"), ConfigError, {"a pickle": PICKLE}),
    "chats": Parser(file("c.jsonl", CHAT * 2), "*", lambda at: read_chats(at / "c.jsonl"), ConfigError, {
        "deep": '{"messages": ' + DEEP, "a long integer": f'{{"messages": [{LONG}]}}',
    }),
    "task folder": Parser(files(TASK), "**/*", read_task_folder, ValueError, {
        "deep": file("task.toml", f"x = {DEEP}"), "a deep key": file("task.toml", f"[metadata]\n{'a.' * 20_000}a = 1"),
        "a deep table": file("task.toml", f"[{'a . ' * 20_000}a]"),
        "a quoted key": file("task.toml", "'a'." * 20_000 + "a = 1"),
        "a size without end": file("task.toml", f"[environment]\nmemory = '{LONG}G'"),
        "a long integer": file("task.toml", f"[environment]\nmemory_mb = {LONG}"),
        "a link to the host": link("instruction.md", "/etc/passwd"), "an endless link": link("task.toml", "/dev/zero"),
        "a link in the tests": link("tests/stolen", "/etc/passwd"), "in the image": link("environment/x", "/etc"),
        "a link in circles": link("tests/test.sh", "test.sh"), "no UTF-8": file("instruction.md", b"\xff"),
    }),
    "tar": Parser(lambda at: put("a.tar", pack([Entry("a", None), Entry("a/b", b"x" * 600, True)]), at), "*",
        lambda at: entries_of((at / "a.tar").read_bytes()), ValueError, {"a pickle": PICKLE}),
    "reward": Parser(files({"reward.txt": "1", "reward.json": '{"reward": 1, "b": 3}'}), "*", read_reward, ValueError, {
        "deep": DEEP, "a long integer": LONG, "no number": file("reward.txt", "nan"),
    }),
    "Dockerfile": Parser(file("Dockerfile", TASK["environment/Dockerfile"]), "*",
        lambda at: images_of((at / "Dockerfile").read_text(errors="replace")), SandboxError,
        {"a file of the host": "FROM x\nADD http://h/x /", "lines": "FROM x\nRUN " + "\\\n" * 50_000 + "\nADD x x"}),
    "checkpoint": Parser(files({"run.json": "{}"}, step=3, incarnation=1), "*", read_checkpoint, ValueError, {
        **as_device(MANIFEST),
        "deep": DEEP, "infinite": '{"files": {}, "step": 1e999, "incarnation": 0}', "no step": '{"files": {}}',
        "a device": '{"files": {"/dev/zero": {"num_bytes": 0, "sha256": ""}}, "step": 1, "incarnation": 0}',
        "no name": '{"files": {"\\u0000": {"num_bytes": 0, "sha256": ""}}, "step": 1, "incarnation": 0}',
        "a long name": f'{{"files": {{"{LONG}": {{"num_bytes": 0, "sha256": ""}}}}, "step": 1, "incarnation": 0}}',
    }),
    "training state": Parser(file(f"{TRAINING}/{PROGRESS}", '{"parts": ["policy"], "num_updates": {"policy": 3}}'),
        f"{TRAINING}/*", TrainingProgress.read, ConfigError, {
            **as_device(f"{TRAINING}/{PROGRESS}"),
            "deep": DEEP, "a long integer": LONG, "a list": "[]",
            "below 0": '{"parts": [], "num_updates": {"policy": -1}}',
            "a word": '{"parts": ["policy"], "num_updates": {"policy": "3"}}',
        }),
    "weights": Parser(make_weights, "*", read_weights, WeightUpdateError, {
        **as_device("model.safetensors.index.json"),
        "weights of a pipe": in_its_place("model-1.safetensors", os.mkfifo),
        "a pickle": file("model-1.safetensors", PICKLE), "a huge header": file("model-1.safetensors", b"\xff" * 8),
        "huge": file("model-1.safetensors", header(x={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]})),
        "deep": file("model.safetensors.index.json", DEEP),
        "numbers": file("model.safetensors.index.json", '{"weight_map": {"a": 1, "b": "x"}}'),
        "a device": file("model.safetensors.index.json", '{"weight_map": {"a": "/dev/zero"}}'),
        "no name": file("model.safetensors.index.json", '{"weight_map": {"a": "\\u0000"}}'),
    }),
    "adapter": Parser(make_adapter, "adapter_*", read_adapter, WeightUpdateError, {
        **as_device("adapter_config.json"),
        "a pickle": file("adapter_model.safetensors", PICKLE), "deep": file("adapter_config.json", DEEP),
        "a long rank": file("adapter_config.json", f'{{"r": {LONG}}}'),
        "modules that are no list": file("adapter_config.json", '{"target_modules": "q", "r": 2, "lora_alpha": 4}'),
        "wide": file("adapter_config.json", '{"base_model_name_or_path": "b", "target_modules": ["q"], "r": 1e18,'
                     ' "lora_alpha": 4}'),
    }),
    "image": Parser(make_images, "images/*/*", read_image, LedgerError, {
        "another": b"x", "nothing": as_image(lambda file: None), "a folder": as_image(Path.mkdir),
        "a device": as_image(lambda file: file.symlink_to("/dev/zero")), "a pipe": as_image(os.mkfifo),
        "itself": as_image(lambda file: file.symlink_to(file.name)),
    }),
    "picture": Parser(file("picture", PICTURE), "picture", read_picture, RequestError, {
        "a bomb": png((b"IHDR", b"\0\1\0\0\0\1\0\0\x08\2\0\0\0"), (b"IDAT", zlib.compress(bytes(2**20)))),
        "a text that unpacks": png((b"IHDR", b"\0\0\0\x38\0\0\0\x38\x08\2\0\0\0"),
                                   (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27), 9))),
        "a pickle": PICKLE, "another format": b"GIF89a" + bytes(100), "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    }),
    "processor": Parser(make_processor, "preprocessor_config.json", read_processor, ConfigError, {
        "deep": DEEP, "a list": "[]", "a deep config": file("config.json", DEEP),
        "more patches than any takes": json.dumps(PROCESSOR | {"min_pixels": 2**22, "max_pixels": 2**23}),
    }),
    "model": Parser(lambda at: shutil.copytree(sys.argv[1], at, dirs_exist_ok=True), "*", read_model, ConfigError, {
        **as_device("config.json"),
        "only a pickle": only_pickled, "a pickle": file("model.safetensors", PICKLE), "deep": file("config.json", DEEP),
        "code": with_config(model_type="own", auto_map={"AutoConfig": "code.Y", "AutoModelForCausalLM": "code.X"}),
        "wide": with_config(hidden_size=2**20, vocab_size=2**20),
        "long": with_config(num_hidden_layers=10**7, layer_types=None), "a tokenizer": file("tokenizer.json", DEEP),
        "an escape": file("chat_template.jinja", "{{ cycler.__init__.__globals__.os.system('touch harmed') }}"),
    }),
    "template": Parser(file("chat.jinja", TEMPLATE), "*", read_template, (ConfigError, RequestError), {
        "an escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}", "deep lists": "{{ " + DEEP,
        "a function": f"{{{{ cycler.__init__.__globals__.os.system('touch {HARM}') }}}}", "deep": "{{ " + "(" * 50_000,
        "nested": "{% if true %}" * 5000 + "{% endif %}" * 5000,
        "endless": "{% for i in range(10 ** 12) %}x{% endfor %}",
        "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    }),
    "ledger": Parser(make_ledger, "*.sqlite", read_ledger, LedgerError, {
        "a view": sql(f"ALTER TABLE leases RENAME TO l; CREATE VIEW leases AS {ENDLESS}"),
        "in a shard": sql(f"ALTER TABLE turns RENAME TO l; CREATE VIEW turns AS {ENDLESS}", "ledger-w0.sqlite"),
        "an old trigger": sql(f"CREATE TRIGGER t BEFORE UPDATE ON leases BEGIN SELECT count(*) FROM ({ENDLESS}); END;"
                              "PRAGMA user_version = 2"),
        "a virtual table": sql("DROP TABLE leases; CREATE VIRTUAL TABLE leases USING fts5(session)"),
        "spans of numbers": sql("UPDATE completions SET versions = '[[1, 2, 3]]'"),
        "spans of text": sql("UPDATE completions SET versions = '[[\"v1\", \"x\", {}]]'"),
        "deep": sql(f"UPDATE turns SET request_delta = '{DEEP}'"), "sampling": sql("UPDATE turns SET sampling = '[]'"),
        "numbers for blobs": sql("UPDATE completions SET token_ids = 'abcd', logprobs = 5"),
        "another version": sql("PRAGMA user_version = 2147483647"),
        **{f"a time of {what}": sql(f"UPDATE turns SET started_s = {what}") for what in ("'x'", "x'ff'")},
        **{f"messages {what}": sql(f"UPDATE turns SET request_delta = '{what}'") for what in (
            "[1]", '[{"tool_calls": 5}]', '[{"tool_calls": [1]}]', '[{"tool_calls": [{"function": 3}]}]',
            f'[{{"content": {"[" * 900}{"]" * 900}}}]')},
        "a token below 0": sql("UPDATE completions SET token_ids = x'ffffffff', logprobs = x'00000000'"),
        "a huge place": sql("UPDATE turns SET fork_at = 1099511627776"),
        "a huge span": sql("UPDATE turns SET images = '[[\"\", 1, 1099511627776]]'"),
    }),
    "snapshot": Parser(make_snapshot, "*/*", read_snapshot, LedgerError, {
        "no database": partial(make_snapshot, change=file("ledger.sqlite", "no database")),
        "a trigger": partial(make_snapshot, change=sql(
            f"CREATE TRIGGER t BEFORE INSERT ON notes BEGIN SELECT count(*) FROM ({ENDLESS}); END")),
    }),
    "token records": Parser(make_tokens, "*/*.npz", lambda at: read_seen(at, 1, "a"), LedgerError, {
        **as_device("token_records/step_000001-0.npz"),
        "a pickle": PICKLE, "objects": arrays(sessions=np.array([Harm()]), lengths=np.array([1])),
        "text": arrays(sessions=np.array(["a"]), lengths=np.array(["x"])), "nothing": arrays(sessions=np.array(["a"])),
    }),
    "metrics": Parser(file("m.jsonl", '{"kind": "step", "step": 1}\n{"step": 2}\n'), "*",
        lambda at: [row.get("step") for row in read_metrics(at / "m.jsonl")], ArealAgentError,
        {"deep": DEEP + "\n", "no object": "[1]\n", **as_device("m.jsonl"),
         "a folder": in_its_place("m.jsonl", Path.mkdir)}),
    "results": Parser(file(RESULTS, json.dumps(RESULT)), "*", lambda at: compare(at, at), ConfigError, {
        **as_device(RESULTS),
        "deep": DEEP, "a list": "[]", "answers of numbers": json.dumps(RESULT | {"answers": [1]}),
    }),
}
# fmt: on


def faults_of(parser: Parser, top: Path, seed: str, number: int) -> Iterator[str]:
    """Print the name of each case before it, and yield what was wrong with it."""
    (valid := top / "valid").mkdir()
    parser.make(valid)
    names = sorted(str(path.relative_to(valid)) for path in valid.glob(parser.damaged) if path.is_file())
    cases: list[tuple[str, Change]] = [("valid", lambda folder: None)]
    cases += [(name, made if callable(made) else file(names[0], made)) for name, made in parser.hostile.items()]
    for index in range(number):
        chance = random.Random(f"{seed}-{index}")
        name = chance.choice(names)
        cases.append((f"{name}, {seed}-{index}", file(name, damaged((valid / name).read_bytes(), chance))))
    for name, change in cases:
        print(json.dumps(name), flush=True)
        faulthandler.dump_traceback_later(CASE_S, exit=True)  # also where Python is not asked any more
        shutil.copytree(valid, folder := top / "case", symlinks=True)
        change(folder)
        os.chdir(folder)
        try:
            parser.read(folder)
            if name in parser.hostile:
                yield f"{name}: it was taken"
        except Exception as error:
            if name == "valid" or not isinstance(error, parser.refuses):
                yield f"{name}: {''.join(traceback.format_exception(error, limit=-2))[-500:]}"
        if list(folder.rglob(HARM)):
            yield f"{name}: code was run"
        os.chdir(top)
        shutil.rmtree(folder)
        if name == "valid":  # from here on, what libraries load and start once is there
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + SPARE_BYTES, resource.RLIM_INFINITY))


def serve() -> None:
    """Try the cases that stdin asks for. Each line of stdout names the next, and a list has what was wrong."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, seed, number = json.loads(line)
        with tempfile.TemporaryDirectory() as top:
            faults = list(faults_of(PARSERS[name], Path(top), seed, number))
            faulthandler.cancel_dump_traceback_later()
            os.chdir("/")
        print(json.dumps(faults), flush=True)


class Readers:
    """The readers' process, started when it is needed. Its stderr is the test's."""

    def __init__(self, *models: Path) -> None:
        self._command = [sys.executable, __file__, *map(str, models)]
        self._process: subprocess.Popen[str] | None = None

    def faults(self, *asked: object) -> Sequence[str]:
        """Return what was wrong with a parser's cases, or the case at which the process ended."""
        if self._process is None:
            threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
            variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), **threads}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, env=variables, stdin=pipe, stdout=pipe, text=True)
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        told: str | list[str] = "at the start"
        while isinstance(told, str) and self._process.stdout and (line := self._process.stdout.readline()):
            told = json.loads(line)
        if isinstance(told, list):
            return told
        status = self._process.wait()
        self.close()
        return [f"{told}: the process ended with {status}; 1: it took more than {CASE_S:g} s"]

    def close(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None


@pytest.fixture(scope="module")
def readers(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    vision_model = make_vision_model(tmp_path_factory.mktemp("vision"))
    with closing(Readers(small_model, vision_model)) as readers:
        yield readers


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", PARSERS)
def test_it_is_taken_or_refused(readers: Readers, name: str) -> None:
    seed = "0" if settings.default.derandomize else str(random.randrange(2**32))
    assert readers.faults(name, seed, settings.default.max_examples) == []


if __name__ == "__main__":
    serve()
