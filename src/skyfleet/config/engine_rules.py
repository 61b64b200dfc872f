"""Engine rules: what the keys that choose engines owe each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyfleet.config.root import RunConfig


def handed_no_weights(config: RunConfig) -> Iterator[str]:
    """Loads, because it can be played."""
    generator = config.generator
    if generator.backend == "openai":
        yield (
            "generator.backend='openai' speaks through servers, and nothing hands new weights to "
            "them: play with `skyfleet evaluate` or `rollout`, or train with "
            "generator.backend=embedded or vllm, which may be a server with run_engines_locally=false"
        )


def _servers_are_named(config: RunConfig) -> Iterator[str]:
    generator, urls = config.generator, config.generator.remote_inference_engine_urls
    if generator.is_remote and not urls:
        yield (
            f"generator.backend={generator.backend!r} with generator.run_engines_locally="
            f"{str(generator.run_engines_locally).lower()} speaks through servers, and none is "
            "named; set generator.remote_inference_engine_urls=[http://host:port/v1]"
        )
    if urls and not generator.is_remote:
        yield (
            f"generator.remote_inference_engine_urls={urls} names servers, and "
            f"generator.backend={generator.backend!r} speaks in this process; drop the urls, or "
            "set generator.run_engines_locally=false with generator.backend=vllm to train those "
            "servers, or generator.backend=openai to play with them"
        )
    if generator.is_remote and urls and generator.num_inference_engines not in (1, len(urls)):
        yield (
            f"generator.num_inference_engines={generator.num_inference_engines} and "
            f"generator.remote_inference_engine_urls names {len(urls)}; drop the number"
        )


ENGINE_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (_servers_are_named,)
