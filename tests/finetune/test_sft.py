import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from panjue.eval.classifier import load_classifier
from panjue.finetune.checkpoints import newest_complete
from panjue.finetune.libraries import trainer_config
from panjue.finetune.model import load_base, with_lora
from panjue.finetune.settings import SftConfig, sft_settings
from panjue.finetune.sft import main, train
from panjue.finetune.trainer import PartsTrainer
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.config import load_section
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, read_lines
from panjue.prompts.plumbing.run import Run, RunRecord
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

from .conftest import PLAIN_WORDS, Trained

UNFINISHED = {"examples": None, "labels_sha256": None, "classifier_sha256": None}


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    return [float(entry["loss"]) for entry in entries if "loss" in entry]


def test_a_run_leaves_everything_and_learns(trained: Path, workshop: Path) -> None:
    for name in ("adapter_model.safetensors", "labels.json", "manifest.json", "classifier.npz"):
        assert (trained / "adapter" / name).is_file()
    assert (trained / "config.yaml").is_file()
    assert any((trained / "tensorboard").rglob("events.out.tfevents*"))
    curve = losses(trained)
    assert len(curve) == 12
    assert sum(curve[-3:]) < sum(curve[:3])
    labels = load_labels(trained / "adapter/labels.json")
    assert labels.most["charges"] >= 1
    assert set(labels.counts) == {"charges", "articles", "penalty"}


def test_a_training_fits_a_classifier_unless_told_otherwise(
    trained: Path, workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = load_task("judgment")
    classifier = load_classifier(trained / "adapter", task)
    assert classifier
    example = next(Reader(task).read(workshop / "demo/test.jsonl"))
    assert [set(item) for item in classifier.opinions(example)] == [
        {"charges", "articles", "penalty"}
    ] * len(example.names)
    words = [f"run={tmp_path}/run", "trainer.max_steps=1", "score_examples=0", "classifier=false"]
    main(workshop / "sft.yaml", words)
    assert "fitting the text classifier" not in capsys.readouterr().out
    assert not (tmp_path / "run/adapter/classifier.npz").exists()
    assert "classifier_sha256" not in read_json(tmp_path / "run/adapter/manifest.json")
    main(workshop / "sft.yaml", words[:-1])
    assert "already trained with these settings" in capsys.readouterr().out


def test_labels_come_from_what_is_trained_on_and_not_from_the_held_out_tenth(
    trained: Path, workshop: Path
) -> None:
    task = load_task("judgment")
    everything = task.ask.labels(Reader(task).read(workshop / "demo/train.jsonl"))
    seen = load_labels(trained / "adapter/labels.json")
    assert sum(seen.counts["charges"].values()) < sum(everything.counts["charges"].values())


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ([], 2),
        (["trainer.eval_steps=5"], 3),  # the last step is evaluated too
        (["trainer.eval_steps=0.25"], 4),
        (["trainer.eval_steps=5", "trainer.eval_delay=6"], 2),
        (["trainer.max_steps=20", "trainer.eval_strategy=epoch"], 2),
        (["trainer.eval_strategy='no'"], 0),
    ],
)
def test_the_plan_counts_the_evaluations(
    words: list[str],
    number: int,
    workshop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"run={tmp_path}/run", "trainer.save_strategy='no'", *words]
    main(workshop / "sft.yaml", [*words, "dry_run=true"])
    [line] = [s for s in capsys.readouterr().out.splitlines() if s.startswith("evaluations")]
    assert line.split()[1].strip(",") == (str(number) if number else "none")
    if number:
        main(workshop / "sft.yaml", [*words, "score_examples=0"])
        made = [row for _, row in read_lines(tmp_path / "run/log.jsonl") if "eval_loss" in row]
        assert len(made) == number


def test_the_last_lines_have_the_score_of_what_was_kept_and_the_next_command(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    main(workshop / "sft.yaml", [f"run={run}", "trainer.max_steps=2", "trainer.eval_steps=1"])
    lines = capsys.readouterr().out.splitlines()
    stages = [line for line in lines if line.split(" ")[0] in ("1/4", "2/4", "3/4", "4/4")]
    assert stages == [
        "1/4 reading and tokenizing the cases",
        "2/4 loading the base model",
        "3/4 training the adapter",
        "4/4 saving",
    ]
    of_what = "all cases that are not held out (at most 12,000 of a file)"
    assert f"fitting the text classifier on {of_what}" in lines
    checkpoint = newest_complete(run / "checkpoints")
    assert checkpoint
    best = read_json(checkpoint / "trainer_state.json")["best_metric"]
    assert lines[-2:] == [
        f"written: {run}/adapter (final {best:.4f} on 10 held-out cases, free replies without the "
        "schema; `panjue score` scores all cases, decoded under the schema)",
        f"next: panjue generate {run} TEST",
    ]


def test_a_run_keeps_its_settings_and_its_record(trained: Path, workshop: Path) -> None:
    run = Run(trained)
    assert load_section(SftConfig, run.config, "sft").lora == {
        "r": 8,
        "target_modules": "all-linear",
    }
    assert run.record.base == f"{workshop}/base/model"
    assert not RunRecord.read(trained).difference(run.record.model_copy(update=UNFINISHED))


def test_a_finished_run_is_left_alone(
    trained: Path, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "adapter/adapter_model.safetensors").stat().st_mtime_ns
    main(workshop / "sft.yaml")
    assert "already trained" in capsys.readouterr().out
    assert (trained / "adapter/adapter_model.safetensors").stat().st_mtime_ns == before


def test_other_settings_in_the_same_folder_are_refused_by_name(
    workshop: Path, trained: Path
) -> None:
    with pytest.raises(UserError, match=r"seed: 0 -> 1"):
        main(workshop / "sft.yaml", ["seed=1"])


def test_resume_takes_the_newest_complete_checkpoint_and_gives_the_same_weights(
    trained: Path, workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-12/complete").unlink()
    main(workshop / "sft.yaml", [f"run={run}"])
    assert "checkpoint-6" in capsys.readouterr().out
    again, once = (load_file(f / "adapter/adapter_model.safetensors") for f in (run, trained))
    assert all(torch.equal(again[name], once[name]) for name in once)
    seen, counted = (
        [entry["num_tokens"] for _, entry in read_lines(f / "log.jsonl") if "num_tokens" in entry]
        for f in (run, trained)
    )
    assert seen == counted, "tokens are counted on from those of the checkpoint"
    assert seen == sorted(seen)


@pytest.mark.parametrize("spent", [False, True], ids=["at the last step", "of patience"])
def test_a_training_that_is_over_is_only_saved(
    trained: Path, workshop: Path, tmp_path: Path, spent: bool
) -> None:
    run, config = tmp_path / "run", workshop / "sft.yaml"
    words = [f"run={run}"]
    if spent:  # a rate of nought: no evaluation is better than the first
        words += ["trainer.learning_rate=0", "trainer.eval_steps=2", "trainer.save_steps=2"]
        words += ["trainer.max_steps=40", "patience=2"]
        main(config, words)
    else:
        shutil.copytree(trained, run)
    before = load_file(run / "adapter/adapter_model.safetensors")
    log = (run / "log.jsonl").read_bytes()
    shutil.rmtree(run / "adapter")
    main(config, words)
    after = load_file(run / "adapter/adapter_model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (run / "log.jsonl").read_bytes() == log, "not a step more"


def test_resume_false_drops_the_checkpoints_of_before(
    trained: Path, workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-6/of before").touch()
    main(workshop / "sft.yaml", [f"run={run}", "resume=false"])
    assert (run / "checkpoints/checkpoint-6").is_dir()
    assert not (run / "checkpoints/checkpoint-6/of before").exists()
    assert next(row["step"] for _, row in read_lines(run / "log.jsonl") if "loss" in row) == 1
    again, once = (load_file(f / "adapter/adapter_model.safetensors") for f in (run, trained))
    assert all(torch.equal(again[name], once[name]) for name in once)


AT_THE_END = ["trainer.max_steps=8", "trainer.eval_strategy='no'", "trainer.save_steps=8"]
BY_EPOCH = [
    "trainer.max_steps=20", "trainer.eval_strategy=epoch", "trainer.save_strategy=epoch",
    "score_examples=2",
]  # fmt: skip
STOPS: list[tuple[signal.Signals, list[str]]] = [
    (signal.SIGTERM, AT_THE_END),
    (signal.SIGINT, AT_THE_END),
    (signal.SIGTERM, BY_EPOCH),
    (signal.SIGTERM, [*AT_THE_END, "trainer.train_sampling_strategy=group_by_length"]),
]
DROPOUT = "lora.lora_dropout=0.2"
"""An evaluation that drew random numbers would change the steps after it."""

SCORINGS: list[tuple[str, int, list[str]]] = [
    ("prediction_step", 6, [DROPOUT]),
    ("__call__", 6, [DROPOUT]),
    ("__call__", 12, [DROPOUT]),
    ("__call__", 14, ["trainer.max_steps=20", *BY_EPOCH[1:]]),
]
"""In what a signal comes: a batch of the held-out loss, or a token of a reply; at which step; and
the words of the training."""
MOMENTS = ["print_plan", "claim", "write_json", "newest_complete"]
SHORT = ["trainer.max_steps=2", "trainer.eval_strategy='no'", "trainer.save_strategy='no'"]

FORKS = """
import json, os, signal, sys
from pathlib import Path
from panjue.finetune import result, sft
from panjue.finetune.journal import Journal
from panjue.finetune.scoring import TokenCounter
from panjue.finetune.trainer import PartsTrainer
from panjue.prompts.cli import main
from panjue.prompts.reader import Reader

def told_to_stop(number, *words):
    logged = Journal.on_log

    def on_log(self, args, state, control, **more):
        logged(self, args, state, control, **more)
        if state.global_step == 2:  # twice: `make` and launchers pass on what all got
            os.kill(os.getpid(), int(number))
            os.kill(os.getpid(), int(number))

    Journal.on_log = on_log
    sys.argv[1:] = ["sft", *words]
    main()

def told_while_scoring(name, step, *words):
    owner = TokenCounter if name == "__call__" else PartsTrainer
    method, calls = getattr(owner, name), []

    def disturbed(self, *given, **more):
        trainer = self._trainer if name == "__call__" else self
        if trainer.state.global_step == int(step):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            print("calls", len(calls), file=sys.stderr)
        return method(self, *given, **more)

    setattr(owner, name, disturbed)
    sys.argv[1:] = ["sft", *words]
    main()

def killed_before(moment, *words):
    for module in (sft, result):
        if hasattr(module, moment):
            setattr(module, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    sft.main(Path(words[0]), words[1:])

ends = []
for name, words, errors in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        globals()[name](*words)
        sys.exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""
"""Each training is a process of its own, forked from one that has imported torch for all."""


@dataclass(frozen=True)
class Ended:
    """How the process of a training ended."""

    run: Path
    code: int
    errors: str


@pytest.fixture(scope="module")
def ended(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Return how trainings ended that got a signal (`stop-0`, …) or were killed (`claim`, …)."""
    folder, config = tmp_path_factory.mktemp("ended"), str(workshop / "sft.yaml")
    tries = {
        f"stop-{n}": ("told_to_stop", [str(int(number)), config, f"run={folder}/stop-{n}", *saves])
        for n, (number, saves) in enumerate(STOPS)
    }
    for n, (name, step, words) in enumerate(SCORINGS):
        run = f"run={folder}/scoring-{n}"
        tries[f"scoring-{n}"] = ("told_while_scoring", [name, str(step), config, run, *words])
    for moment in MOMENTS:
        words = [moment, config, f"run={folder}/{moment}", *SHORT]
        tries[moment] = ("killed_before", words)
    given = [(name, words, f"{folder}/{key}.err") for key, (name, words) in tries.items()]
    words = [sys.executable, "-c", FORKS, json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return {
        key: Ended(folder / key, code, (folder / f"{key}.err").read_text("utf-8"))
        for key, code in zip(tries, codes, strict=True)
    }


@pytest.fixture(scope="module")
def undisturbed(
    workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[str]], Path]:
    """Return what gives the run folder of a training with these words that nobody disturbed."""
    folder, made = tmp_path_factory.mktemp("undisturbed"), dict[tuple[str, ...], Path]()

    def once(words: list[str]) -> Path:
        run = made.setdefault(tuple(words), folder / str(len(made)))
        main(workshop / "sft.yaml", [f"run={run}", *words])  # a finished one is left alone
        return run

    return once


@pytest.mark.parametrize("stop", range(len(STOPS)))
def test_a_training_that_is_told_to_stop_saves_first_and_goes_on(
    stop: int, ended: dict[str, Ended], undisturbed: Callable[[list[str]], Path], workshop: Path
) -> None:
    (number, words), training = STOPS[stop], ended[f"stop-{stop}"]
    told = training.errors
    assert training.code == 128 + number, told
    assert told.count("stopping after this step is saved") == 1
    assert "which is saved; run the same command to resume" in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (training.run / "adapter").exists()
    stopped_at = newest_complete(training.run / "checkpoints")
    assert stopped_at is not None
    assert 2 <= int(stopped_at.name.split("-")[1]) < 8
    main(workshop / "sft.yaml", [f"run={training.run}", *words])
    again, once = (
        load_file(run / "adapter/adapter_model.safetensors")
        for run in (training.run, undisturbed(words))
    )
    assert all(torch.equal(again[name], once[name]) for name in once)


@pytest.mark.parametrize("number", range(len(SCORINGS)))
def test_a_signal_during_the_scoring_is_honoured_at_once_and_the_scoring_repeated(
    number: int,
    ended: dict[str, Ended],
    undisturbed: Callable[[list[str]], Path],
    workshop: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (_, step, words), stopped = SCORINGS[number], ended[f"scoring-{number}"]
    assert stopped.code == 128 + signal.SIGTERM, stopped.errors
    last = 20 if "trainer.max_steps=20" in words else 12
    assert stopped.errors.splitlines()[-1] == (
        f"panjue: stopped at step {step} of {last}, which is saved but not scored; "
        "run the same command to resume"
    )
    calls = [line for line in stopped.errors.splitlines() if line.startswith("calls")]
    assert calls[-1] == "calls 2", "neither a batch nor a token more"
    newest = newest_complete(stopped.run / "checkpoints")
    assert newest is not None
    assert newest.name == f"checkpoint-{step}"
    main(workshop / "sft.yaml", [f"run={stopped.run}", *words])
    assert "scoring it first: a signal had stopped that" in capsys.readouterr().out
    once = undisturbed(words)
    weights = [load_file(f / "adapter/adapter_model.safetensors") for f in (stopped.run, once)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    scores = [
        [
            (row["step"], row["eval_loss"], row["eval_final"])
            for _, row in read_lines(f / "log.jsonl")
            if "eval_loss" in row
        ]
        for f in (stopped.run, once)
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_before_the_first_step_leaves_nothing_in_the_way(
    workshop: Path, moment: str, ended: dict[str, Ended]
) -> None:
    killed = ended[moment]
    assert killed.code == -signal.SIGKILL, killed.errors
    main(workshop / "sft.yaml", [f"run={killed.run}", *SHORT, "seed=1"])
    assert (killed.run / "adapter/adapter_model.safetensors").is_file()


def test_dry_run_shows_the_plan_and_trains_nothing(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true"])
    said = capsys.readouterr().out
    for word in (
        "examples",
        "refused",
        "shortened",
        "tokens",
        "weights",
        "steps",
        "memory",
        "[loss]",
    ):
        assert word in said
    lines = said.splitlines()
    assert lines[:2] == ["1/2 reading and tokenizing the cases", "2/2 loading the base model"]
    assert (
        "evaluations  2, after every 6 steps: the loss of 10 held-out cases; "
        "10 of them are answered, without the schema, and scored" in lines
    )
    assert "next:" not in said
    assert not (tmp_path / "run/adapter").exists()
    assert not (tmp_path / "run/manifest.json").exists()


POLYNOMIAL = "trainer.lr_scheduler_type=polynomial  trainer.lr_scheduler_kwargs={lr_end: 0.001}"


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("trainer.use_liger_kernel=true", "trainer.use_liger_kernel: its kernels need a GPU"),
        (
            "trainer.report_to=[wandb]",
            "trainer.report_to: wandb cannot be used here; run .venv/bin/pip install wandb",
        ),
        ("trainer.report_to=[wnadb]", "trainer.report_to: no tracker 'wnadb'; did you mean"),
        ("trainer.optim=galore_adamw", "trainer: You need to install `galore_torch`"),
        ("trainer.optim=lomo", "trainer: You need to install `lomo_optim`"),
        ("trainer.lr_scheduler_type=cosine_with_min_lr", "trainer: .*min_lr"),
        ("trainer.lr_scheduler_kwargs={cycles: 2}", "trainer: .*'cycles'"),
        (f"{POLYNOMIAL}  trainer.learning_rate=1e-5", "trainer: lr_end .0.001. must be smaller"),
        ("attn_implementation=flash_attention_2", "needs its package, which is not installed"),
        ("lora.kasa_config={}", "lora: these settings change the base's weights too"),
    ],
)
def test_a_dry_run_finds_what_the_first_step_would_miss(
    word: str, complaint: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true", *word.split("  ")])
    assert "\n" not in str(error.value)


def test_a_dry_run_takes_a_schedule_that_ends_below_the_runs_own_rate(
    workshop: Path, tmp_path: Path
) -> None:
    words = [*POLYNOMIAL.split("  "), "trainer.learning_rate=0.01"]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", "dry_run=true", *words])
    assert not (tmp_path / "run/adapter").exists()


def test_another_attention_gives_the_same_losses(
    workshop: Path, tmp_path: Path, undisturbed: Callable[[list[str]], Path]
) -> None:
    words = ["trainer.max_steps=2", "trainer.eval_strategy='no'", "trainer.bf16=false"]
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *words, "attn_implementation=eager"])
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed(words)), rel=1e-4)
    assert read_json(tmp_path / "run/manifest.json")["attn_implementation"] == "eager"


def test_an_accelerator_of_any_maker_is_used(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sft_settings(workshop / "sft.yaml", [f"run={tmp_path}/run"])
    task = load_task(config.task)
    assert trainer_config(config, task, evaluates=True).use_cpu
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    args = trainer_config(config, task, evaluates=True)
    assert not args.use_cpu
    assert args.gradient_checkpointing


def test_what_a_dry_run_leaves_is_no_other_run(workshop: Path, tmp_path: Path) -> None:
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *SHORT, "dry_run=true", "seed=1"])
    main(workshop / "sft.yaml", [f"run={tmp_path}/run", *SHORT])
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_a_checkpoint_without_a_record_is_somebodys_work(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/checkpoint-6").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds another run \(there is no record"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *SHORT])


def test_qlora_takes_real_steps_on_four_bits_and_answers_from_them(
    workshop: Path, tmp_path: Path
) -> None:
    nf4 = "load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_compute_dtype: float32"
    bits = f"quantization={{{nf4}}}"
    words = [
        f"run={tmp_path}/run",
        "method=qlora",
        bits,
        "trainer.max_steps=2",
        "trainer.eval_steps=2",
        "trainer.save_strategy='no'",
    ]
    main(workshop / "sft.yaml", words)
    assert all(0 < loss < 100 for loss in losses(tmp_path / "run"))
    log = (tmp_path / "run/log.jsonl").read_text("utf-8")
    assert '"eval_final":' in log, "held-out cases were answered by the four-bit model"
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_a_four_bit_base_stays_as_small_as_it_is_loaded(workshop: Path) -> None:
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = with_lora(load_base(workshop / "base/model", torch.bfloat16, nf4), {"r": 2})
    whole = {p.dtype for name, p in model.named_parameters() if "lora" not in name}
    assert whole == {torch.bfloat16, torch.uint8}, "no embedding or norm in float32"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora" in name
    }


def test_an_evaluation_leaves_the_gradients_of_a_four_bit_model(workshop: Path) -> None:
    """On a CPU with AVX-512 BF16, bitsandbytes passes none after it; on others it always does."""
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    model = with_lora(load_base(workshop / "base/model", torch.bfloat16, nf4), settings)
    ids, norms = torch.arange(1, 9)[None], []
    for _ in range(2):
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append([p.grad.norm().item() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
    assert norms[1] == norms[0]
    assert min(norms[0]) > 0


def test_a_result_without_weights_is_none(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under FSDP with SHARDED_STATE_DICT, where trainers save nothing."""
    monkeypatch.setattr(PartsTrainer, "save_model", lambda _, folder: Path(folder).mkdir())
    with pytest.raises(UserError, match=r"no weights were written.*FULL_STATE_DICT"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *SHORT])
    assert not (tmp_path / "run/adapter").exists()


def test_packing_is_padding_free_and_trains(workshop: Path, tmp_path: Path) -> None:
    words = [f"run={tmp_path}/run", "trainer.packing=true", "trainer.per_device_train_batch_size=1"]
    main(workshop / "sft.yaml", [*words, "trainer.max_steps=3", "trainer.save_strategy='no'"])
    assert len(losses(tmp_path / "run")) == 3


def test_two_processes_give_the_loss_of_one_at_equal_global_batch(
    courts: Path, tmp_path: Path, two_processes: Trained
) -> None:
    main(courts, [f"run={tmp_path}/one", *PLAIN_WORDS])
    assert "4 of 8 examples" in two_processes.said  # twice four
    one, two = losses(tmp_path / "one"), losses(two_processes.folder / "plain")
    assert one == pytest.approx(two, rel=1e-3)


def test_a_signal_to_one_process_stops_the_scoring_of_both_and_the_weights_are_the_same(
    two_processes: Trained,
) -> None:
    for process in (0, 1):
        line = f"process {process} stopped at step 2 of 4, which is saved but not scored; "
        assert line in two_processes.said
    stopped, once = (two_processes.folder / f"scored-{name}" for name in ("stopped", "once"))
    weights = [load_file(run / "adapter/adapter_model.safetensors") for run in (stopped, once)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    logs = [
        [
            (row["step"], row["eval_loss"])
            for _, row in read_lines(run / "log.jsonl")
            if "eval_loss" in row
        ]
        for run in (stopped, once)
    ]
    assert logs[0] == logs[1]
    assert [step for step, _ in logs[0]] == [2, 4]


def test_processes_wait_for_one_another_as_long_as_is_said(two_processes: Trained) -> None:
    assert two_processes.said.count("waited at most 4321.0 seconds") == 2


def test_the_first_process_alone_hashes_the_base(two_processes: Trained) -> None:
    assert two_processes.said.count("the base was hashed by process 0") == 6, "once per training"
    assert "the base was hashed by process 1" not in two_processes.said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trainer.learning_rat=1"], "did you mean 'learning_rate'"),
        (["lora.rank=8"], "lora: no setting 'rank'"),
        (["trainer.max_length=5"], "use max_tokens"),
        (["max_token=5"], "did you mean 'max_tokens'"),
        (["train=nowhere.jsonl"], "no file nowhere.jsonl"),
        (["model=./nowhere"], "no such folder"),
        (["model=Qwen/NoSuchModel"], "the hub cannot provide it"),
        (["task=judgement"], "did you mean 'judgment'"),
        (["dtype=float17"], "float17"),
        (["method=qlora"], "goes with method=qlora"),
        (["trainer.save_strategy=often"], "trainer: "),
        (["trainer.seed=1"], "use seed"),
        (["trainer.save_total_limit=two"], "save_total_limit: Input should be a valid integer"),
    ],
)
def test_bad_settings_end_in_one_line(
    words: list[str], complaint: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", *words])
    assert "\n" not in str(error.value)


def test_a_test_file_is_nothing_to_learn_from(workshop: Path, tmp_path: Path) -> None:
    case = json.loads((workshop / "demo/train.jsonl").read_text("utf-8").splitlines()[0])
    del case["outcomes"]
    (tmp_path / "test.jsonl").write_text(json.dumps(case), "utf-8")
    with pytest.raises(UserError, match="no answer to learn from"):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", f"train={tmp_path}/test.jsonl"])


CONFIGS = (Path(__file__).parents[2] / "finetune/configs").glob("*.yaml")


@pytest.mark.parametrize("path", sorted(path for path in CONFIGS if path.name != "fsdp2.yaml"))
def test_every_shipped_config_loads(path: Path) -> None:
    from panjue.finetune.libraries import check_library_settings
    from panjue.finetune.settings import BaseConfig

    config = load_section(
        BaseConfig if path.stem == "base" else SftConfig, path, "sft", ["train=x.jsonl"]
    )
    check_library_settings(config)
    assert train is not None
