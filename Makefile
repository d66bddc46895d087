# `make score` does the whole job on invented cases: install, train, decode, score.
# With your own:  make sft generate score MODEL=Qwen/Qwen3-8B TRAIN=train.jsonl TEST=test.jsonl
# Later on:       make score RUN=runs/mine TEST=other.jsonl; make serve RUN=runs/mine
# More settings:  CONFIG=qwen3-8b-qlora SFT="trainer.max_steps=200 gpus=8" GENERATE="answer=model"; V=1 shows the commands
export PYTHONSAFEPATH = 1
PYTHON ?= python3
GPU    := $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | grep -x '[0-9]*' | sort -n | head -n 1)
KNOWN  := CONFIG DEV GENERATE GPU MODEL PYTHON RUN SCORE SERVE SFT STAGE TASK TEST TRAIN V
UNKNOWN := $(firstword $(filter-out $(KNOWN),$(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))))
nearest = $(shell $(PYTHON) -c "import difflib, sys; print(*difflib.get_close_matches('$(1)'.upper(), sys.argv[1:], 1, 0.5))" $(KNOWN))
$(if $(UNKNOWN),$(error no variable $(UNKNOWN)$(patsubst %,; did you mean %?,$(call nearest,$(UNKNOWN))) (there are $(KNOWN))))
space  := $(subst ,, )
escaped = $(subst $(space),\ ,$(1))
stem    = $(subst |,$(2),$(basename $(notdir $(subst $(space),|,$(1:/=)))))
DEMO   := $(if $(TRAIN)$(MODEL)$(TASK)$(filter-out demo,$(CONFIG))$(if $(CONFIG),,$(RUN)),,data/demo/)
AGAIN  := $(if $(filter sft,$(MAKECMDGOALS))$(SFT)$(MODEL)$(CONFIG)$(TASK)$(if $(RUN),,$(TRAIN)),again)
CONFIG := $(or $(CONFIG),$(if $(MODEL),$(if $(GPU),qwen3-8b-$(if $(filter 0,$(shell [ $(GPU) -lt 39000 ]; echo $$?)),qlora,lora),qwen2.5-0.5b-cpu),demo))
override RUN := $(or $(RUN:/=),runs/$(CONFIG)$(if $(filter-out judgment,$(TASK)),-$(TASK))$(if $(MODEL),-$(notdir $(subst $(space),_,$(MODEL:/=))))$(if $(TRAIN),-$(call stem,$(TRAIN),_)))
TRAINED := $(call escaped,$(RUN)/$(if $(wildcard $(call escaped,$(RUN)/model/manifest.json)),model,adapter)/manifest.json)
GOLD   := $(or $(TEST),$(addsuffix test.jsonl,$(DEMO)))
ANSWERS := $(RUN)/answers/$(call stem,$(GOLD),$(space))
want    = $(if $(filter $(2),$(MAKECMDGOALS)),$(error say $(1)))
ALONE  := ; the invented cases are for the demo alone (no RUN, TRAIN, MODEL, TASK or other CONFIG)
$(if $(GOLD),,$(call want,TEST=FILE$(ALONE),generate score check-submission))
$(if $(filter demo,$(CONFIG))$(filter file,$(origin CONFIG)),$(if $(TRAIN)$(DEMO)$(wildcard $(TRAINED)),,$(call want,TRAIN=FILE or correct RUN: nothing is trained in $(RUN),sft generate score serve)))
.NOTPARALLEL:
.PHONY: help install dev lock check test torture gpu demo base sft generate score check-submission serve again
help: ; @sed -n "/^# .*: /s/^# //p" Makefile; sed -n "s/^\([a-z-]*\):.*  # \(.*\)/\1|\2/p" Makefile | awk -F'|' '{printf "%-17s %s\n", $$1, $$2}'  # this list
install: .venv/installed  # .venv with what training, generation and serving need, in exact versions
dev: .venv/dev  # the same, and what `check`, `test` and `torture` need; they install it themselves
.venv/installed .venv/dev: pyproject.toml $(addprefix .ci/,install uv cpu.lock cpu.never gpu.lock gpu.never); .ci/install $(PYTHON) $(filter dev,$(@F))
lock: ; PYTHON=$(PYTHON) .ci/lock  # the newest versions of all packages for `make install`; then check, test and torture
check: dev  # ruff and mypy, a minute
	mkdir -p build/typing/panjue && ln -sfn $(addprefix ../../../,prompts finetune serve eval) build/typing/panjue/ && .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
test: dev; .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder  # the test suite, with two processes
torture: dev; .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/torture tests/gpu --torture  # kills, full disks, hostile text, every command of the READMEs: an hour
gpu: dev data/demo/train.jsonl runs/base/model/manifest.json; PYTHONPATH=. .venv/bin/python tests/gpu/hour.py $(if $(STAGE),--stage '$(STAGE)') $(if $(MODEL),--model '$(MODEL)')  # an hour on a GPU: parity, speed, kills; STAGE= for one
demo: data/demo/train.jsonl  # write invented cases
base: runs/base/model/manifest.json  # train the demo's tiny base model from nothing
data/demo/train.jsonl: | .venv/installed; .venv/bin/panjue demo data/demo
runs/base/model/manifest.json: | data/demo/train.jsonl; .venv/bin/panjue base finetune/configs/base.yaml
$(TRAINED): $(AGAIN) | .venv/installed $(addsuffix train.jsonl,$(DEMO)) $(if $(filter demo,$(CONFIG)),$(if $(MODEL)$(wildcard $(TRAINED)),,runs/base/model/manifest.json))
	$(if $(and $(TEST),$(filter generate score check-submission,$(MAKECMDGOALS))),[ -e '$(TEST)' ] || { echo "TEST: no file $(TEST)" >&2; exit 2; })
	.venv/bin/panjue sft finetune/configs/$(CONFIG).yaml 'run=$(RUN)' $(if $(TASK),task=$(TASK)) $(if $(MODEL),'model=$(MODEL)') $(if $(TRAIN),'train=$(TRAIN)') $(if $(DEV),'dev=$(DEV)') $(SFT)
sft: $(TRAINED)  # fine-tune: cases in, adapter out
generate: $(TRAINED); .venv/bin/panjue generate '$(RUN)' '$(GOLD)' $(GENERATE)  # answer every test case
score: generate; .venv/bin/panjue score '$(GOLD)' '$(RUN)' --json '$(ANSWERS)/scores.json' $(SCORE)  # the official metric with intervals
check-submission: .venv/installed; .venv/bin/panjue check '$(RUN)' --cases '$(GOLD)'  # every fault of a submission, with its place
serve: $(TRAINED); .venv/bin/panjue serve '$(RUN)' $(SERVE)  # answer over HTTP, with a page to ask from
$(V).SILENT:
