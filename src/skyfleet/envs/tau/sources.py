"""Read `tau_bench:retail?split=test` and `tau2:airline?split=base`."""

from __future__ import annotations

from urllib.parse import parse_qsl

from skyfleet.envs.tau.v1_tasks import tau_bench_tasks
from skyfleet.envs.tau.v2_tasks import tau2_tasks
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task


def tau_tasks_from_source(source: str) -> list[Task]:
    """Return the tasks of a domain's split: test by default, of tau2 base."""
    suite, _, rest = source.partition(":")
    domain, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    split = options.pop("split", None)
    if options:
        raise ConfigError(
            f"{source}: {next(iter(options))!r} is unknown; write {suite}:{domain}?split=test"
        )
    if suite == "tau2":
        return tau2_tasks(domain) if split is None else tau2_tasks(domain, split)
    return tau_bench_tasks(domain) if split is None else tau_bench_tasks(domain, split)
