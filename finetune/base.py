"""A tiny base model trained from scratch, for machines without access to the hub: `make base`.

A byte-level tokenizer and a model of the Qwen3 architecture, both trained on invented cases with
two or three defendants. The model can do nothing else. In the demo it stands in for a real Qwen.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from panjue.finetune.checkpoints import disk_errors_named
from panjue.finetune.settings import OTHER_RUN, BaseConfig
from panjue.finetune.sft import train
from panjue.prompts.plumbing.config import check_known, check_managed
from panjue.prompts.plumbing.files import (
    atomic_folder,
    exclusive_lock,
    read_json,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.ours import is_base, refuse_foreign
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
"""Qwen's pre-tokenizer without English contractions; each digit is its own token."""

COMMON_CHARACTERS = """
的一是了我不人在他有这个上们来到时大地为子中你说生国年着就那和要她出也得里后自以会家可下而过天去能对小多然于心学
么之都好看起发当没成只如事把还用第样道想作种开美总从无情己面最女但现前些所同日手又行意动方期它头经长儿回位分爱老因很
给名法间斯知世什两次使身者被高已亲其进此话常与活正感见明问力理尔点文几定本公特做外孩相西果走将月十实向声车全信重三机
工物气每并别真打太新比才便夫再书部水像眼等体却加电主界门利海受听表德少克代员许先口由死安写性马光白或住难望教命花结乐
色更拉东神记处让母父应直字场平报友关放至张认接告入笑内英军候民岁往何度山觉路带万男边风解叫任金快原吃变通师立象数四失
满战远格士音轻目条病始达深完今提求清王化空业思切怎非找片罗钱语元曾离飞科言干流约各即指合反题必该论交终林请医晚制决传
画保读运及则房早院量苦火布品近坐产答星精视五连司管类未朋且婚台夜青北队久乎越观落尽形影红百令周识步留市半送兴造谈容极
随收首根讲整式取照办强石古华拿计装似足双妻转诉米称客南领节衣站黑刻统断福城故历选包紧争另建维绝系伤示持千准联妇纪基买
共官待究跟穿室程号居考突费倒价图具商专黄块脚改据破引食仍存众注某血备校务须试料调广查密议底列座参八除设线停际致阳李验
助严证支罪犯刑盗窃抢劫诈骗毒赌伙窜抓获供述缴案款购售贩卖携刀鉴害嫌疑侦押逃骑驶撬锁殴租赃赔偿谅鉴县镇村街银
"""
"""Frequent characters. Each gets a token: real cases then have half as many tokens as bytes."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)
"""The chat template of Qwen3's hybrid models, with the empty think block."""

TEMPLATE_WORDS = "user\nassistant\n<think>\n\n</think>\n\n"
"""Text that the template adds to each case, without special tokens. The tokenizer is trained on it,
so that it takes 9 tokens; otherwise it would take 31."""


def make_base(config: BaseConfig) -> None:
    """Write an untrained model to the folder `model`, then train it and save RUN/model.

    An untrained model with other settings in the folder `model` is replaced. UserError: that folder
    has anything else.
    """
    check_managed("shape", config.shape, ("eos_token_id", "pad_token_id"))
    check_known("shape", config.shape, Qwen3Config.__dataclass_fields__)
    made_from = {"shape": config.shape, "seed": config.seed, "train_sha256": sha256(config.train)}
    folder = Path(config.model)
    refuse_foreign(folder, is_base, "model=FOLDER")
    with exclusive_lock(config.run, other=OTHER_RUN):
        is_same = is_base(folder) and made_from.items() <= read_json(folder / "start.json").items()
        if not is_same:
            with atomic_folder(folder, is_base) as temporary, disk_errors_named(folder):
                make_untrained(config, temporary)
                write_json(temporary / "start.json", {**made_from, "panjue": panjue_version()})
    train(config)


def make_untrained(config: BaseConfig, folder: Path) -> None:
    """Write a tokenizer trained on the training cases and a random model to `folder`."""
    reader = Reader(load_task(config.task), columns=config.columns, on_bad_row=config.on_bad_row)
    texts = tokenizer_texts(reader, config.train)
    tokenizer = train_tokenizer(texts, config.shape.get("vocab_size", 4096))
    torch.manual_seed(config.seed)
    shape = Qwen3Config(
        **{**config.shape, "vocab_size": len(tokenizer)},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_texts(reader: Reader, cases: Path) -> Iterator[str]:
    """Yield the tokenizer's training texts: prompts and replies, with names cut into characters.

    A name must have the same tokens everywhere, otherwise so small a model never learns to follow
    a person through the text; without the cut, BPE joins names with the words around them. The
    common characters are repeated often enough to become tokens.
    """
    yield from COMMON_CHARACTERS.strip() * 50
    task = reader.task
    for example in reader.read(cases):
        prompt = [message["content"] for message in task.ask.prompt(example)]
        for text in (*prompt, TEMPLATE_WORDS, task.ask.target(example)):
            for name in example.names:
                text = text.replace(name, "\n" + "\n".join(name) + "\n")  # noqa: PLW2901
            yield text


def train_tokenizer(lines: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, which encodes any text; each digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
