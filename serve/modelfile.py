"""The Modelfile beside a merged model, with which Ollama asks it as training did."""

from typing import Any

from panjue.prompts.render import TEMPLATE_ARGS

GGUF = "model.gguf"
"""The file that llama.cpp's converter makes of the merged model (serve/README.md, "Export")."""

PROMPT = "{{ .Prompt }}"
"""What Ollama replaces by the user's message."""

MODELFILE = '''\
# Make {gguf} (serve/README.md, "Export"), then `ollama create panjue -f Modelfile` here.
FROM ./{gguf}
TEMPLATE """{template}"""
PARAMETER stop "{stop}"
PARAMETER temperature 0
PARAMETER repeat_penalty 1
PARAMETER num_ctx {max_tokens}
'''
"""Some versions of Ollama penalize repetition by default; judgments repeat charges and keys."""


def modelfile(tokenizer: Any, max_tokens: int) -> str:
    """Return a Modelfile whose template is the chat template of training, for one user message.

    Args:
        tokenizer: The model's tokenizer.
        max_tokens: Limit on prompt plus reply.
    """
    message = {"role": "user", "content": PROMPT}
    text = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False, **TEMPLATE_ARGS
    )
    if tokenizer.bos_token_id in tokenizer("").input_ids:
        text = text.removeprefix(tokenizer.bos_token)  # llama.cpp adds it, as the tokenizer does
    # What else looks like a field of the template would be taken for one.
    escaped = PROMPT.join(part.replace("{{", '{{"{{"}}') for part in text.split(PROMPT))
    return MODELFILE.format(
        gguf=GGUF, template=escaped, stop=tokenizer.eos_token, max_tokens=max_tokens
    )
