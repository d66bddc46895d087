# `make score` does the whole job on invented cases: install, train, decode, score.
# With your own:  make sft generate score MODEL=Qwen/Qwen3-8B TRAIN=train.jsonl TEST=test.jsonl
# Ask by hand:    make serve, then make chat or http://127.0.0.1:8000/
# Further files:  make score RUN=runs/mine TEST=other.jsonl  (what RUN was trained with needs no repeating)
# More settings:  CONFIG=qwen3-8b-qlora RUN=runs/mine SFT="trainer.max_steps=200" GENERATE="adapter=lora"
export PYTHONSAFEPATH = 1
PYTHON   ?= python3
GPU      := $(shell command -v nvidia-smi 2>/dev/null)
comma    := ,
# The slash that a shell's completion leaves behind a folder would leave `notdir` nothing.
override MODEL := $(MODEL:/=)
override TRAIN := $(TRAIN:/=)
override TEST  := $(TEST:/=)
override DEV   := $(DEV:/=)
override RUN   := $(RUN:/=)
# What RUN was trained with stands in its config.yaml, else in its adapter, and is not asked for again.
RECORD   := $(if $(RUN),$(firstword $(wildcard $(addprefix $(RUN)/,config.yaml adapter/manifest.json model/manifest.json))))
recorded  = $(if $(RECORD),$(shell sed -n 's|^$(1)$$|\1|p' $(RECORD)))
NOTHING  := $(if $(RUN),$(if $(RECORD)$(CONFIG)$(MODEL)$(TRAIN)$(TASK),,$(RUN)))
CONFIG   := $(or $(CONFIG),$(call recorded,\# .*configs/\(.*\)\.yaml),$(if $(MODEL)$(RECORD),$(if $(GPU),qwen3-8b-lora,qwen2.5-0.5b-cpu),demo))
TASK     := $(or $(TASK),$(call recorded,task: \(.*\)),$(call recorded,  "task": "\(.*\)"$(comma)))
override RUN := $(or $(RUN),runs/$(CONFIG)$(if $(filter-out judgment,$(TASK)),-$(TASK))$(if $(MODEL),-$(notdir $(MODEL)))$(if $(TRAIN),-$(basename $(notdir $(TRAIN)))))
BAD      := $(if $(ON_BAD_ROW),on_bad_row=$(ON_BAD_ROW))
BAD_ROW  := $(if $(ON_BAD_ROW),--on-bad-row $(ON_BAD_ROW))
OF_TASK  := $(addprefix --task ,$(TASK))
# Invented cases stand in for the user's only where nothing says that it is not the demo.
INVENTED := $(if $(filter-out demo,$(CONFIG))$(filter-out judgment,$(TASK))$(filter-out data/demo/train.jsonl,$(call recorded,train: \(.*\))),,data/demo)
CASES    := $(or $(TRAIN),$(call recorded,train: \(.*\)),$(addsuffix /train.jsonl,$(INVENTED)))
HELD_OUT := $(or $(DEV),$(filter-out null,$(call recorded,dev: \(.*\))))
GOLD     := $(or $(TEST),$(if $(TRAIN),,$(addsuffix /test.jsonl,$(INVENTED))))
PANJUE   := .venv/bin/panjue
TRAINED  := $(wildcard $(RUN)/adapter/manifest.json $(RUN)/model/manifest.json)
LAUNCH   := $(if $(filter-out 1,$(GPUS)),$(if $(TRAINED),,.venv/bin/accelerate launch $(if $(ACCELERATE),--config_file $(ACCELERATE),--multi_gpu --mixed_precision no --dynamo_backend no) --num_processes $(GPUS) --num_machines 1 --main_process_port 0))
$(if $(ACCELERATE),$(if $(filter-out 1,$(GPUS)),,$(error ACCELERATE=$(ACCELERATE) is for several processes: say how many, GPUS=8)))
ANSWERS  ?= $(basename $(notdir $(GOLD)))
FOLDER    = $(RUN)/answers/$(ANSWERS)
TUNED     = $(RUN)/tune/answers/$(if $(filter file,$(origin ANSWERS)),$(basename $(notdir $(or $(HELD_OUT),$(CASES)))),$(ANSWERS))
given     = $(foreach name,$(1),$(if $($(name)),$(shell echo $(name) | tr A-Z a-z)=$($(name))))

# A variable that is misspelt would be ignored, and the demo trained in place of what was meant.
KNOWN    := ACCELERATE ANSWERS CHAT CONFIG DEV GENERATE GPU GPUS MIX MODEL ON_BAD_ROW PYTHON RUN SERVE SFT TASK TEST TRAIN
UNKNOWN  := $(firstword $(filter-out $(KNOWN),$(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))))
nearest   = $(shell $(PYTHON) -c "import difflib, sys; print(*difflib.get_close_matches('$(1)'.upper(), sys.argv[1:], 1, 0.5))" $(KNOWN))
$(if $(UNKNOWN),$(error no variable $(UNKNOWN)$(patsubst %,; did you mean %?,$(call nearest,$(UNKNOWN))) (there are $(KNOWN))))
.PHONY: help install dev lock check test torture demo base sft tune generate score check-submission serve chat
.NOTPARALLEL:
$(foreach name,TRAIN TEST DEV MIX MODEL RUN,$(if $(word 2,$($(name))),$(error \
  $(name)=$($(name)): make takes no path with spaces; rename it, or give a link to it)))
$(if $(NOTHING),$(if $(filter generate tune score serve,$(MAKECMDGOALS)),$(if $(filter sft,$(MAKECMDGOALS)),,$(error \
  RUN=$(NOTHING): nothing is trained there; say CONFIG=demo to train the demo there, or MODEL=… TRAIN=…))))
want = $(if $(filter $(2),$(MAKECMDGOALS)),$(error \
  say $(1)=FILE: the invented cases are for the demo alone (no TRAIN, MODEL, TASK or CONFIG)))
ifeq ($(CASES),)  # a config other than the demo's may name them itself
$(if $(filter demo,$(CONFIG)),$(call want,TRAIN,sft generate tune score serve))
$(if $(HELD_OUT),,$(call want,TRAIN,tune))
endif
$(if $(GOLD),,$(call want,TEST,generate score check-submission))
help:  # this list
	@sed -n "/^# /{s/^# //p;b};/^export/q" Makefile; echo; sed -n "s/^\([a-z-]*\):[^#]*  # \(.*\)/\1|\2/p" Makefile | awk -F'|' '{printf "%-17s %s\n", $$1, $$2}'
LOCKED   := pyproject.toml $(addprefix .ci/,install uv cpu.lock cpu.never gpu.lock gpu.never)
install: .venv/installed  # .venv with what training, generation and serving need, in exact versions
.venv/installed: $(LOCKED)
	.ci/install $(PYTHON)
dev: .venv/dev  # the same, and what `check`, `test` and `torture` need; they install it themselves
.venv/dev: $(LOCKED)
	.ci/install $(PYTHON) dev
lock:  # the newest versions of all packages for `make install`; then check, test and torture
	PYTHON=$(PYTHON) .ci/lock
check: dev build/typing/panjue  # ruff and mypy, a minute
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
build/typing/panjue:  # a view of the package that mypy and editors can follow
	mkdir -p $@ && ln -sfn $(addprefix ../../../,prompts finetune serve eval) $@/
# Two processes: most of the time goes into imports, which use one core.
test: dev  # the test suite, 12 to 15 minutes
	.venv/bin/pytest -n 2
torture: dev  # what "Nothing lost" says in serve/README.md, and every command of the READMEs, tried for real
	.venv/bin/pytest -n 2 tests/torture --torture
demo: install  # write invented cases
	$(PANJUE) demo data/demo
base: demo  # train the tiny base model from nothing
	$(PANJUE) base finetune/configs/base.yaml
sft: $(if $(filter-out demo,$(CONFIG))$(MODEL)$(RECORD),install,base)  # fine-tune: cases in, adapter out
	$(strip $(LAUNCH) $(PANJUE)) sft finetune/configs/$(CONFIG).yaml run=$(RUN) $(call given,TASK MODEL TRAIN DEV MIX) $(BAD) $(SFT)
generate: sft  # answer every test case
	$(PANJUE) generate serve/configs/$(CONFIG).yaml run=$(RUN) $(call given,TASK) test=$(GOLD) answers=$(ANSWERS) $(BAD) $(GENERATE)
tune: sft  # fit how answers are decided to answers of held-out cases
	$(PANJUE) generate serve/configs/$(CONFIG).yaml run=$(RUN)/tune $(call given,TASK) \
	  trained=$(RUN) samples=8 $(if $(HELD_OUT),test=$(HELD_OUT),test=$(CASES) held_out=true) answers=$(notdir $(TUNED)) $(BAD) $(GENERATE)
	$(PANJUE) tune $(TUNED)
serve: sft  # answer over HTTP, with a page to ask from
	$(PANJUE) serve serve/configs/$(CONFIG).yaml run=$(RUN) $(call given,TASK) $(SERVE)
chat: install  # ask a running server from the terminal
	@$(PANJUE) chat $(CHAT)
score: generate  # the official metric with intervals
	$(PANJUE) score $(GOLD) $(FOLDER) $(OF_TASK) --json $(FOLDER)/scores.json $(BAD_ROW)
check-submission: install  # every fault of a submission, with its place
	$(PANJUE) check $(FOLDER) --cases $(GOLD) --labels $(FOLDER)/labels.json $(OF_TASK) $(BAD_ROW)
