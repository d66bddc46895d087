"""vLLM's own app over an engine of ours."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

# Before vLLM: serve.engine sets what vLLM reads when it is imported.
from panjue.serve.engine import StrictLLM, call_engine, engine_settings

# isort: split
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.utils.argparse_utils import FlexibleArgumentParser

from panjue.prompts.render import TEMPLATE_ARGS
from panjue.serve.settings import BASE, NAME, ServeConfig
from panjue.serve.trained import Served


def arguments(config: ServeConfig, served: Served, max_tokens: int) -> Namespace:
    """Return the arguments of vLLM's server.

    Raises:
        TypeError: They do not go together.
    """
    given = {
        "max_num_queued_reqs": config.in_flight,
        "default_chat_template_kwargs": TEMPLATE_ARGS,
        # Parts of a message that are joined with nothing between could spell a control token.
        "chat_template_content_format": "string",
        "allowed_media_domains": ["nothing.invalid"],  # nothing is fetched for a client
        **config.engine,
        **engine_settings(served, config.seed, max_tokens),
        "model": str(served.model),
        "served_model_name": [BASE if served.adapter else NAME],
        "generation_config": "vllm",  # not the hub's: a repetition penalty would skew the answers
        "disable_fastapi_docs": True,
    }
    if served.adapter:
        given["lora_modules"] = [LoRAModulePath(name=NAME, path=str(served.adapter))]
    defaults = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args = Namespace(**{**vars(defaults), **given})
    validate_parsed_serve_args(args)
    return args


async def build_vllm_app(llm: StrictLLM, args: Namespace) -> FastAPI:
    """Return vLLM's own app over an engine."""
    tasks = await llm.get_supported_tasks()
    app: FastAPI = build_app(args, tasks, llm.model_config)
    # vLLM's handler of a dead engine's errors tells its server to end: we see to that.
    app.state.server = SimpleNamespace()
    await call_engine(llm, init_app_state(llm, app.state, args, tasks))

    async def models() -> dict[str, Any]:
        # Not the base beside an adapter, nor where the model lies on disk.
        listed = (await app.state.openai_serving_models.show_available_models()).model_dump()
        mine = [{**card, "root": NAME, "parent": None} for card in listed["data"]]
        return {**listed, "data": [card for card in mine if card["id"] == NAME]}

    app.get("/v1/models")(models)
    app.router.routes.insert(0, app.router.routes.pop())  # before vLLM's
    return app
