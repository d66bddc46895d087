"""vLLM's own server app, over an engine that panjue starts."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

# Imported before vLLM: serve.engine sets environment variables that vLLM reads on import.
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
        TypeError: The arguments do not fit together.
    """
    settings = {
        "max_num_queued_reqs": config.in_flight,
        "default_chat_template_kwargs": TEMPLATE_ARGS,
        # Otherwise parts of a message are joined, and could together form a control token.
        "chat_template_content_format": "string",
        "allowed_media_domains": ["nothing.invalid"],  # never fetch files for clients
        **config.engine,
        **engine_settings(served, config.seed, max_tokens),
        "model": str(served.model),
        "served_model_name": [BASE if served.adapter else NAME],
        "generation_config": "vllm",  # the model's own may have a repetition penalty
        "disable_fastapi_docs": True,
    }
    if served.adapter:
        settings["lora_modules"] = [LoRAModulePath(name=NAME, path=str(served.adapter))]
    defaults = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args = Namespace(**{**vars(defaults), **settings})
    validate_parsed_serve_args(args)
    return args


async def build_vllm_app(llm: StrictLLM, args: Namespace) -> FastAPI:
    """Build vLLM's server app over an engine."""
    tasks = await llm.get_supported_tasks()
    app: FastAPI = build_app(args, tasks, llm.model_config)
    # When the engine dies, a handler of vLLM stops `app.state.server`; the lifecycle restarts it.
    app.state.server = SimpleNamespace()
    await call_engine(llm, init_app_state(llm, app.state, args, tasks))

    async def models() -> dict[str, Any]:
        # Without the base model of an adapter, and without the model's path on disk.
        body = (await app.state.openai_serving_models.show_available_models()).model_dump()
        cards = [card for card in body["data"] if card["id"] == NAME]
        return {**body, "data": [{**card, "root": NAME, "parent": None} for card in cards]}

    app.get("/v1/models")(models)
    app.router.routes.insert(0, app.router.routes.pop())  # before vLLM's route of that path
    return app
