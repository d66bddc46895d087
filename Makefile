# `make score` does the whole job on invented cases: install, train, decode, score.
# With your own:  make sft generate score MODEL=Qwen/Qwen3-8B TRAIN=train.jsonl TEST=test.jsonl
# Later on:       make score RUN=runs/mine TEST=other.jsonl; make serve RUN=runs/mine
# More settings:  CONFIG=qwen3-8b-qlora SFT="trainer.max_steps=200 gpus=8" GENERATE="answer=model"
# What is run:    V=1 shows the commands; `panjue sft model=… train=…` is `make sft MODEL=… TRAIN=…`
export PYTHONSAFEPATH = 1
PYTHON ?= python3
PYTEST := .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder
PANJUE := .venv/bin/python -m panjue.finetune.make "$(MAKECMDGOALS)"
STAGE  :=  # of `gpu`, as MODEL: those of the environment do not count
MODEL  :=
MOVED := $(shell [ ! -s .venv/installed ] || [ "$$(cat .venv/installed)" -ef . ] || echo moved)
.PHONY: help install dev lock newest check test torture gpu demo base sft generate score check-submission serve
.PHONY: variables $(MOVED)  # no commands: what is read first; what another folder installed is installed anew
.NOTPARALLEL:

help:  # this list
	sed -n "s/^# //p" Makefile
	awk -F ":.*  # " '/^[a-z-]+:.*  # / {printf "%-17s %s\n", $$1, $$2}' Makefile
install: .venv/installed  # .venv with what training, generation and serving need, in exact versions
dev: .venv/dev  # the same, and what `check`, `test` and `torture` need; they install it themselves
.venv/installed .venv/dev: pyproject.toml $(wildcard .ci/*) $(MOVED)
	.ci/install $(PYTHON) $(filter dev,$(@F))
lock: ; PYTHON=$(PYTHON) .ci/lock  # the newest versions of all packages for `make install`
newest: ; PYTHON=$(PYTHON) .ci/newest  # what breaks without an engine on the newest versions of all packages

variables: install; $(PANJUE)
demo: variables; $(PANJUE) demo data/demo  # write invented cases
base: demo; $(PANJUE) base finetune/configs/base.yaml  # train the demo's tiny base model from nothing
sft: base  # fine-tune: cases in, adapter out
	$(PANJUE) sft CONFIG run=RUN task=TASK model=MODEL train=TRAIN dev=DEV SFT
generate: sft; $(PANJUE) generate RUN TEST GENERATE  # answer every test case
score: generate; $(PANJUE) score TEST ANSWERS SCORE  # the official metric with intervals
check-submission: install; $(PANJUE) check ANSWERS --cases TEST  # every fault of a submission, with its place
serve: sft; $(PANJUE) serve RUN SERVE  # answer over HTTP, with a page to ask from

check: dev  # ruff and mypy, a minute
	mkdir -p build/typing/panjue
	ln -sfn $(addprefix ../../../,prompts finetune serve eval) build/typing/panjue/
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
test: dev; $(PYTEST)  # the test suite: 8 minutes on two cores with AVX-512
torture: dev  # kills, full disks, hostile text, every command of the READMEs: 45 minutes
	$(PYTEST) tests/torture tests/gpu tests/test_families.py tests/serve/test_clients.py --torture
gpu: dev base  # an hour on a GPU: parity, speed, kills; STAGE= for one
	PYTHONPATH=. .venv/bin/python tests/gpu/hour.py --stage "$(STAGE)" --model "$(MODEL)"
$(V).SILENT:
