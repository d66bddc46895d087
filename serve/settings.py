"""Settings of generation and of the server, and their checks before vLLM is imported."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import Field, field_validator

from panjue.finetune.trained import (
    Trained,
    check_classes,
    open_trained,
    refuse_other_choice,
    refuse_untrained,
)
from panjue.prompts.fingerprint import base_change
from panjue.prompts.model import model_folder, prompt_sha256
from panjue.prompts.plumbing.config import (
    Config,
    check_known,
    check_managed,
    load_section,
    refuse_options,
    settings_of,
)
from panjue.prompts.plumbing.endpoint import parse_endpoint
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.run import CONFIG
from panjue.prompts.reader import OnBadRow
from panjue.prompts.task import load_task

AnswerSetting = Literal["auto", "model", "classifier"]

NAME = "panjue"  # model name for clients
BASE = "base"  # vLLM's name for the base model under an adapter; clients cannot use it
SERVER_KEY = "PANJUE_API_KEY"  # environment variable with the key that clients must send
ORIGIN = re.compile(r"https?://[^\s/?#@*]+")  # as browsers send it: no path, no slash at the end
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # hosts that only this machine reaches

IN_FLIGHT = 256
"""Default number of calls that an engine answers at once."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # in GiB; the default takes a share of all memory
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the default leaves one core of two idle
    # On a GPU, vllm/v1/sample/ops/topk_topp_sampler.py:95 compiles it at the start, with nvcc.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # serve.engine_processes watches them
    # Without a GPU, vllm/platforms/cpu.py:335 puts the only worker into its own process, which
    # imports everything once more (12 s) and shares the cores with the engine's busy loop. But
    # without that process, vLLM binds no threads to cores, and reserves no core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Environment variables of vLLM's processes and of Ray, unless the user has set them."""

DEFAULTS = {
    "use_tqdm_on_load": False,
    # FlashInfer's linear attention is compiled at the start, with nvcc
    # (vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:102).
    "gdn_prefill_backend": "triton",
}
"""Defaults of engine arguments; users may set other values."""

ENDPOINT_SAMPLING = (
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "extra_body",
)
"""Settings of `sampling` that OpenAI's chat completions also have; others are refused. `extra_body`
has further fields of a request; OpenAI's client calls it so."""

OF_REQUESTS = ("model", "messages", "n", "stream", *ENDPOINT_SAMPLING)
"""Fields of a request that panjue sets itself or takes from `sampling`."""

RESOURCES = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "cpu_offload_gb",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_flashinfer_autotune",
    "max_parallel_loading_workers",
    "disable_log_stats",
    "distributed_executor_backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
"""Engine arguments of memory and speed. A run may resume with other values, because they must
change after memory was short."""

BACKEND = {"backend": "guidance", "disable_any_whitespace": True}
"""Backend of the schemas. Each case has its own schema: llguidance compiles one in milliseconds,
xgrammar takes about twenty times as long, and `auto` would use both."""

SERVER_ARGUMENTS = (
    "root_path",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "enable_ssl_refresh",
    "enable_request_id_headers",
    "chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
)
"""Arguments of vLLM's server, besides the engine's, that users may set in `engine`."""


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of vLLM's processes, in which they find our packages' programs."""
    programs = Path(sys.executable).parent
    path = f"{programs}{os.pathsep}{own.get('PATH', os.defpath)}"
    return {**ENVIRONMENT, **own, "PATH": path}


class EngineConfig(Config):
    """Settings that `panjue generate` and `panjue serve` share."""

    base: str | None = None
    """Folder or Hugging Face name of the base, if it has moved since training. It must be the same
    base."""
    adapter: Literal["merge", "lora", "none"] = "merge"
    """`merge` answers with the adapter merged into a copy of its base, which is kept. `lora` loads
    the adapter unmerged. `none` asks the base alone."""
    seed: int = 0
    """Seed of the engine."""
    in_flight: int | None = Field(None, ge=1)
    """Number of calls that an engine answers at once; by default 256. Without a server, Ray or an
    endpoint it is vLLM's own limit if that is higher: 1,024 on a GPU of 70 GiB or more, but 256 on
    an A100. A call for `n` replies counts as `n` calls. Further calls wait; the server tells their
    clients to retry."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further arguments that are passed unchanged to vLLM's engine."""

    def slots(self, sequences: int = IN_FLIGHT) -> int:
        """Return how many calls the engines of one process answer at once.

        `sequences` is how many sequences an engine computes at once, if it runs already.
        """
        of_engine = self.in_flight or max(IN_FLIGHT, sequences)
        engines = int(self.engine.get("data_parallel_size") or 1)
        return of_engine * engines


class GenerateConfig(EngineConfig):
    """Settings of `panjue generate`."""

    answers: str = Field("", pattern=r"^([^/\\.][^/\\]*)?$")
    """Name of the folder of answers in RUN/answers; by default the name of TEST without its
    suffix."""
    constrained: bool = True
    """Keep each reply within the JSON schema of its case. If false, replies are free text, and
    repaired if needed."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Arguments that are passed unchanged to vLLM's SamplingParams; greedy by default. For an
    `endpoint`, null leaves a field out, and sampling.extra_body.NAME=VALUE adds a field."""
    samples: int = Field(0, ge=0)
    """Number of further replies to each question, sampled at temperature 1. Tasks with ranked
    answers let all replies vote."""
    answer: AnswerSetting = "auto"
    """Who answers: the `model`, or the training's text `classifier`, which needs no engine. `auto`
    takes for each field the one with the better score on held-out cases, which are asked first."""
    held_out_cases: int = Field(1000, ge=1)
    """Largest number of held-out cases that are asked to decide who answers."""
    columns: dict[str, str] = Field(default_factory=dict)
    """panjue's name of a column -> its name in TEST: columns.fact=content. Other columns are named
    as in training; columns.fact=fact restores panjue's name."""
    limit: int | None = Field(None, ge=1)
    """For a trial: answer only the first `limit` cases, after at most as many held-out cases. The
    default folder of answers is then RUN/answers/TEST-limit20."""
    on_bad_row: OnBadRow = "stop"
    """What to do with a row of TEST that is no valid case: `stop` the run, or `skip` the row and
    list it."""
    solve: dict[str, Any] = Field(default_factory=dict)
    """Settings of a task that takes several calls for an example; by default as in training."""
    ray: Literal["auto"] | None = None
    """`auto` generates on the Ray cluster that this machine belongs to, or that RAY_ADDRESS names.
    By default, one engine of this command generates."""
    replicas: int = Field(1, ge=1)
    """Number of engines in the cluster. Each answers `in_flight` calls at once."""
    endpoint: str | None = None
    """URL#MODEL of an OpenAI-compatible server that answers instead of panjue's own engine."""
    task: str | None = None
    """Task for an `endpoint` if RUN has no training: a folder in prompts/tasks/."""


class ServeConfig(EngineConfig):
    """Settings of the server: the section `serve` of a run's config.yaml."""

    answer: Literal["auto", "model"] = "auto"
    """Who answers. `auto` takes for each field the model or the text classifier, whichever scored
    better on held-out cases; `panjue generate` asks these. `model` lets the model answer
    everything."""
    max_tokens: int | None = Field(None, ge=64)
    """Limit on the tokens of prompt plus reply. The default is the limit of training, so that cases
    are shortened as in training."""
    host: str = "127.0.0.1"
    """Address to listen on. If other machines reach it, PANJUE_API_KEY must be set."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    origins: list[str] = Field(default_factory=list)
    """Origins whose pages may ask from a browser, as origins=[https://tools.example:8443]; none by
    default. Our own page needs none."""

    @field_validator("origins", mode="before")
    @classmethod
    def _one_is_a_list(cls, origins: Any) -> Any:
        return [origins] if isinstance(origins, str) else origins

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; write it as https://tools.example:8443")
        return origins


NOT_FOR_CHOOSE = ("answers", "answer", "columns", "limit", "ray", "replicas", "endpoint", "task")
"""Settings of generation that `panjue choose` does not take: it asks each adapter about held-out
cases with one engine. Their values in config.yaml are for `panjue generate`, and do not count."""


def answer_setting(words: Sequence[str]) -> AnswerSetting | None:
    """Return who answers, from a word such as answer=model; None without a word."""
    refuse_options(words, ("answer",))
    if not words:
        return None
    there_are = "answer=auto, answer=model or answer=classifier"
    if len(words) > 1:
        raise UserError(f"decode: say once {there_are}")
    [word] = words
    key, _, value = word.partition("=")
    if key != "answer" or value not in get_args(AnswerSetting):
        hint = did_you_mean(value, get_args(AnswerSetting))
        raise UserError(f"{word!r}: say {there_are}{hint}")
    return cast(AnswerSetting, value)


def generate_settings(
    run: Path, trained: Trained | None, words: Sequence[str] = ()
) -> GenerateConfig:
    """Read the settings of a run and check them before vLLM is imported."""
    refuse_options(words, settings_of(GenerateConfig))
    for word in words:
        if word.startswith("model="):
            raise UserError(
                f"{word}: no setting 'model': RUN has its own, and a server's is in endpoint="
                "URL#MODEL; base= is a base that was moved"
            )
    config = load_section(GenerateConfig, run / CONFIG, "generate", words)
    if config.replicas > 1 and not config.ray:
        raise UserError("replicas: needs ray=auto; without Ray, set engine.data_parallel_size")
    if config.ray and config.endpoint:
        raise UserError("ray: an endpoint answers already; leave out `ray` or `endpoint`")
    if config.ray and not find_spec("ray"):
        raise UserError("ray: is not installed; .ci/install python3 ray")
    check_task(run, trained, config)
    if config.endpoint:
        parse_endpoint(config.endpoint)  # before a folder of answers is made
        check_known("sampling", config.sampling, ENDPOINT_SAMPLING)
        further = config.sampling.get("extra_body") or {}
        if not isinstance(further, Mapping):
            raise UserError("sampling.extra_body: give fields, e.g. sampling.extra_body.top_k=3")
        managed = [*OF_REQUESTS, *(["response_format"] if config.constrained else [])]
        check_managed("sampling.extra_body", further, managed)
    return config


def choose_settings(trained: Trained, words: Sequence[str] = ()) -> GenerateConfig:
    """Read the settings of `panjue choose`: those of generation that say how a model answers."""
    refuse_options(words, settings_of(GenerateConfig))
    for word in words:
        key = word.partition("=")[0].partition(".")[0]
        if key in NOT_FOR_CHOOSE:
            raise UserError(f"{word}: `panjue choose` asks each adapter itself; leave it out")
    config = load_section(GenerateConfig, trained.run / CONFIG, "generate", words)
    if config.adapter == "none":
        raise UserError("adapter=none: asks the base alone; use merge or lora")
    check_trained(trained)
    defaults = GenerateConfig.model_validate({})
    return config.model_copy(update={name: getattr(defaults, name) for name in NOT_FOR_CHOOSE})


def check_task(run: Path, trained: Trained | None, config: GenerateConfig) -> None:
    """Refuse settings with another task than the training, or without one for an endpoint."""
    if trained:
        check_trained(trained)
        trained_for = trained.record.task
        if config.task not in (None, trained_for):
            raise UserError(f"task: {run} was trained for {trained_for!r}; leave out `task`")
        return
    if not config.endpoint:
        refuse_untrained(run, ", or ask another model: endpoint=URL#MODEL" if config.task else "")
    if config.task is None:
        raise UserError(f"task: set it, e.g. task=dialogue: nothing trained is in {run}")
    task = load_task(config.task)
    if task.closed_labels is None:
        fields = f" ({', '.join(task.open_fields)})" if task.open_fields else ""
        raise UserError(
            f"task: the labels of {config.task!r}{fields} come from a training: run `panjue sft` "
            "first, and ask the endpoint with its RUN; a task of your own can list its labels in "
            "LabelFields(order=…)"
        )


def check_trained(trained: Trained) -> None:
    """Refuse a training whose prompt, labels or chosen adapter have changed since."""
    record = trained.record
    folder = trained.folder
    refuse_other_choice(trained)
    prompt = prompt_sha256(record.task)
    if (prompt, trained.labels_sha256) != (record.prompt_sha256, record.labels_sha256):
        changed = "prompt" if prompt != record.prompt_sha256 else "labels.json"
        raise UserError(f"{folder}: its {changed} has changed since training; restore it")
    check_classes(load_task(record.task), trained.labels, folder)


def server_key(host: str) -> str | None:
    """Return the key that clients must send; refuse a host that others can reach without a key."""
    key = os.environ.get(SERVER_KEY) or None
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{SERVER_KEY}: must be of printable ASCII characters without spaces")
    if host not in LOOPBACK and not key:
        raise UserError(f"host={host}: other machines can reach it; set {SERVER_KEY} to a secret")
    return key


def serve_settings(run: Path, words: Sequence[str]) -> tuple[ServeConfig, dict[str, Trained]]:
    """Return the settings of the server, and the trainings that it serves, by name for clients.

    A word `name=RUN`, whose name is no setting, names a further adapter of the same base.
    """
    refuse_options(words, settings_of(ServeConfig))
    settings = []
    runs = {NAME: run}
    for word in words:
        key, _, value = word.partition("=")
        if key.partition(".")[0] in (NAME, *settings_of(ServeConfig)):
            settings.append(word)
        elif key and value and Path(value).is_dir():
            runs[key] = Path(value)
        else:
            raise UserError(f"{word!r}: no run folder {value!r}, and no setting {key!r}")
    config = load_section(ServeConfig, run / CONFIG, "serve", settings)
    server_key(config.host)  # refuses a missing key before the trainings are read
    trainings = {name: open_trained(folder) for name, folder in runs.items()}
    first = trainings[NAME].record
    for trained in trainings.values():
        check_trained(trained)
        if trained.record.base_sha256 == first.base_sha256:
            continue
        base = model_folder(config.base or first.base)
        if change := base_change(trained.record, base):
            other = f"has another base than {run} ({change})"
            raise UserError(f"{trained.run}: {other}; start another server")
    if len(runs) > 1:
        config = config.model_copy(update={"adapter": "lora"})
    return config, trainings
