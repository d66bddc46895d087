"""Clients that nobody here wrote, each as its manual says; run in an environment of their own.

usage: clients.py CLIENT URL KEY FOLDER
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]


def langchain(url: str, key: str, _: Path) -> None:
    """Invoke, stream, structured output."""
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
    from pydantic import BaseModel

    class Verdict(BaseModel):
        guilty: Literal["yes", "no"]

    chat = ChatOpenAI(base_url=url, api_key=key, model="panjue", temperature=0, max_tokens=8)
    whole: Any = chat.invoke(MESSAGES)
    assert whole.usage_metadata["output_tokens"] <= 8
    assert "".join(str(piece.content) for piece in chat.stream(MESSAGES)) == whole.content
    room = ChatOpenAI(base_url=url, api_key=key, model="panjue", temperature=0)
    verdict: Any = room.with_structured_output(Verdict, method="json_schema").invoke(MESSAGES)
    assert verdict.guilty in ("yes", "no")


def litellm(url: str, key: str, _: Path) -> None:
    """Whole and streamed."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm  # type: ignore[import-not-found]

    asked: Any = {"model": "openai/panjue", "api_base": url, "api_key": key, "temperature": 0}
    asked |= {"messages": MESSAGES, "max_tokens": 8}
    whole: Any = litellm.completion(**asked)
    pieces: Any = litellm.completion(**asked, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 8


def llm(url: str, key: str, folder: Path) -> None:
    """The command, whole and streamed."""
    model = f"- model_id: mine\n  model_name: panjue\n  api_base: {url}\n  api_key_name: mine\n"
    (folder / "extra-openai-models.yaml").write_text(model, "utf-8")
    os.environ["LLM_USER_PATH"] = str(folder)
    command = [str(Path(sys.executable).with_name("llm")), "-m", "mine", "--key", key, "-n"]
    command += ["-o", "temperature", "0", "-o", "max_tokens", "8", "你好"]
    streamed = subprocess.check_output(command)
    assert streamed
    assert subprocess.check_output([*command, "--no-stream"]) == streamed


def inspect(url: str, key: str, folder: Path) -> None:
    """An evaluation of one sample."""
    from inspect_ai import Task  # type: ignore[import-not-found]
    from inspect_ai import eval as evaluate
    from inspect_ai.dataset import Sample  # type: ignore[import-not-found]
    from inspect_ai.model import GenerateConfig, get_model  # type: ignore[import-not-found]
    from inspect_ai.scorer import includes  # type: ignore[import-not-found]

    config = GenerateConfig(max_tokens=8, temperature=0)
    model = get_model("openai-api/panjue/panjue", base_url=url, api_key=key, config=config)
    task = Task(dataset=[Sample(input="你好", target="")], scorer=includes())
    [log] = evaluate(task, model=model, log_dir=str(folder), display="none")
    assert log.status == "success", log.error
    usage = asyncio.run(model.generate("你好")).usage
    assert 0 < usage.output_tokens <= 8


if __name__ == "__main__":
    client, url, key, folder = sys.argv[1:]
    globals()[client](url, key, Path(folder))
    print(f"{client} works")
