"""The Modelfile for Ollama: it asks with the chat template of training."""

import re
from pathlib import Path

from tokenizers.processors import TemplateProcessing

from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.reader import Reader
from panjue.prompts.render import prompt_ids, render
from panjue.prompts.task import load_task
from panjue.serve.merge import modelfile


def template_of(text: str) -> str:
    [template] = re.findall(r'^TEMPLATE """(.*?)"""$', text, re.MULTILINE | re.DOTALL)
    return str(template)


def test_what_ollama_asks_has_the_tokens_of_training(merged: Path, workshop: Path) -> None:
    tokenizer, text = load_tokenizer(merged), (merged / "Modelfile").read_text("utf-8")
    assert f"num_ctx {read_json(merged / 'manifest.json')['max_tokens']}\n" in text
    assert f'stop "{tokenizer.eos_token}"' in text
    assert "PARAMETER temperature 0\nPARAMETER repeat_penalty 1\n" in text
    for case in Reader(load_task("judgment")).read(workshop / "demo/test.jsonl"):
        [message] = messages = render("judgment", case)
        asked = template_of(text).replace("{{ .Prompt }}", message["content"])
        assert tokenizer(asked, add_special_tokens=False).input_ids == prompt_ids(
            tokenizer, messages
        )


def test_the_first_token_and_braces_of_a_template_by_hand(merged: Path) -> None:
    tokenizer = load_tokenizer(merged)
    bos = tokenizer.bos_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{{ bos_token }}[{{ '{{' }}] {{ messages[0]['content'] }}{% if add_generation_prompt %} ->"
        "{% endif %}"
    )
    asked = '[{{"{{"}}] {{ .Prompt }} ->'
    assert template_of(modelfile(tokenizer, 64)) == bos + asked, "nobody else would add it"
    post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = post_processor
    assert template_of(modelfile(tokenizer, 64)) == asked
