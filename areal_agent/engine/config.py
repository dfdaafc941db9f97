"""The config section of the inference engine."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_agent.engine.backend import Backend
from areal_agent.section import Section


class EngineConfig(Section):
    """How tokens are sampled. Derived from the rest of the config: the model, the seed and the weight version."""

    backend: Backend = "embedded"
    """`embedded`: the engine that comes with areal_agent, in processes of its own. `sglang`, `vllm`: their servers,
    started with `python` or running at `urls`; seeds of requests hold in SGLang with its
    `--enable-deterministic-inference`."""
    python: str | None = None
    """The Python of an environment that has SGLang or vLLM: it starts the servers. Their pins are their own, so each
    has one."""
    num_servers: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers to start, each in a process of its own with `threads` of its own. Each turn goes to the one that has its
    beginning in its cache, unless that has more to do than others. With `device: cuda` each has GPUs of its own."""
    first_gpu: Annotated[int, Field(ge=0)] = 0
    """With `device: cuda`: where the GPUs of the first server begin; those of the next ones follow. How many a server
    of SGLang or vLLM has, `server_args` say."""
    server_args: tuple[str, ...] = ()
    """Further arguments of `sglang.launch_server`, as in `["--mem-fraction-static", "0.6"]`, or of `vllm serve`."""
    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/]+")], ...] = ()
    """Servers of SGLang or vLLM that run already, for this run alone, and that see its files: they are given its
    weights. They are SGLang's unless `backend` is `vllm`; SGLang's are started with
    `--incremental-streaming-output`, vLLM's by areal_agent/engine/vllm/launcher.py."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = None
    """An engine that runs already, on this machine: with `rollout.gateway_url`, the engine behind that gateway. The
    server tells of which kind it is; where `backend` says so, too, it has to be that."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the engine on 127.0.0.1, where it is one server; 0 picks a free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of each engine process. Engines and trainer together should not exceed the cores of the machine."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests that sample at once; further ones queue."""
    max_context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    """Prompt and completion of one request together."""
    kv_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens whose keys and values are kept, of running requests and of those that may be continued. Default: what fits
    into a quarter of the machine's memory (a GPU: half of what is free), which the servers there divide, at most two
    contexts a running request; with SGLang, what its `--mem-fraction-static` gives, with vLLM its
    `--gpu-memory-utilization`."""
    leave_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """GiB that keys and values leave free, for a trainer on the same GPU above all: they take the rest of what is free
    once the engine's model is loaded, at most two contexts a running request. A trainer takes 16 bytes a parameter
    (weights, gradients, AdamW's two moments), 2 bytes for each that it publishes, and its activations; the engine takes
    its own activations of it, and 2 bytes a parameter to have new weights beside those that serve."""
    kv_layout: Literal["auto", "slots", "pages"] = "auto"
    """How the embedded engine keeps keys and values. `slots`: each running request has addresses for its whole context,
    whose memory comes as it is written; for CPUs. `pages`: 16 tokens at a time, shared by requests that begin alike;
    for GPUs, and slower on a CPU. `auto`: by the device."""
    cuda_graphs: bool = True
    """On a GPU, the embedded engine records each shape of decode step once and replays it."""
    release_kv: bool = False
    """Give the memory of keys and values back while the trainer trains, for a trainer on the same GPU that needs it.
    Answers under way wait for the end of the train step and are computed again up to where they were."""
    on_push: Literal["interrupt", "turn_boundary", "drain"] = "interrupt"
    """What new weights do to answers under way. `interrupt`: they stop at a token and go on under the new weights.
    `turn_boundary`: they end under the old ones first, and the next turns wait. `drain`: whole rollouts end first."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the engine may take to load the model and answer."""
    hung_after_s: Annotated[float, Field(gt=0)] = 30.0
    """A server that has neither answered nor sampled a token for so long hangs: its turns go on at others. Once
    it answers it is given the weights of the others, and serves again. One that is slow is left alone."""
    wait_s: Annotated[float, Field(gt=0)] = 120.0
    """How long turns and pushes wait while no server serves, before they fail."""

    @model_validator(mode="before")
    @classmethod
    def _urls_are_of_sglang(cls, values: Any) -> Any:
        match values:
            case {"urls": [_, *_]}:
                return {"backend": "sglang"} | values
            case _:
                return values

    @model_validator(mode="after")
    def _fits_its_backend(self) -> Self:
        if self.backend == "embedded":
            self._refuse(_OF_FOREIGN, "is for engine.backend sglang and vllm")
            self._require_places()
            if self.kv_tokens is not None and self.leave_gib is not None:
                raise ValueError(
                    f"engine.kv_tokens is {self.kv_tokens} and engine.leave_gib {self.leave_gib:g}: each alone says "
                    "how much keys and values take; leave one out"
                )
            if self.leave_gib is not None and self.num_servers > 1:
                raise ValueError(
                    f"engine.leave_gib is {self.leave_gib:g}, and engine.num_servers {self.num_servers}: the first "
                    "would leave nothing for the others; say with engine.kv_tokens what each takes"
                )
            return self
        self._refuse(("leave_gib", "kv_layout", "cuda_graphs", "release_kv"), "is for the embedded engine")
        if self.url is not None:
            self._refuse(("urls",), "are the servers of a run, and engine.url is the engine behind a gateway")
        elif self.urls:
            self._refuse(_OF_STARTED_SERVERS, "is for servers that are started here, and engine.urls run already")
        elif self.python is None:
            raise ValueError(
                f"engine.backend is {self.backend!r}: set engine.python to the Python of an environment that has it, "
                "or engine.urls to servers that run"
            )
        if self.backend == "vllm" and self.device == "cpu":
            raise ValueError("engine.device is 'cpu': vLLM takes what its build is for; leave it out")
        if self.first_gpu and any(word.startswith("--base-gpu-id") for word in self.server_args):
            raise ValueError("engine.first_gpu and --base-gpu-id in engine.server_args are the same; leave one out")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"engine.urls names a server twice: {', '.join(self.urls)}")
        self._require_places()
        return self

    def _require_places(self) -> None:
        if self.first_gpu and self.device != "cuda":
            raise ValueError(
                f"engine.first_gpu is {self.first_gpu}, and engine.device {self.device!r}; set that to 'cuda'"
            )
        if self.port and self.num_servers > 1:
            raise ValueError(f"engine.port is {self.port}, and engine.num_servers {self.num_servers}: leave port out")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        """No option is silently without effect."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"engine.{name} {why}; leave it out")


_OF_FOREIGN = ("python", "server_args", "urls")

_OF_STARTED_SERVERS = (
    "python",
    "num_servers",
    "first_gpu",
    "server_args",
    "port",
    "device",
    "threads",
    "max_running_requests",
    "kv_tokens",
)
