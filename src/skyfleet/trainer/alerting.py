"""RunAlerts: what a run reports to Slack and webhooks: start, verdicts, sentinels, end and cost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from skyfleet.config.root import RunConfig
from skyfleet.config.trainer import Trainer
from skyfleet.errors import ConfigError, MissingExtraError, SentinelError, TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.report import EvalReport, load_report
from skyfleet.evaluation.table import comparison_table, conclude, score_table
from skyfleet.serving.access import read_token
from skyfleet.tracking.alerts.alert import ALERTS_FILE, Alert, AlertKind, AlertReceiver, AlertSender
from skyfleet.tracking.alerts.slack import TOKEN_VARIABLE, SlackReceiver
from skyfleet.tracking.alerts.webhook import WebhookReceiver
from skyfleet.tracking.prometheus_tracker import build_metrics_policy, check_port

logger = logging.getLogger(__name__)

_TIMINGS = ("timing/step", "timing/eval", "timing/save_checkpoints", "timing/save_hf_model")
_PACKAGES = {"slack": "slack_sdk", "prometheus": "prometheus_client", "otel": "opentelemetry.sdk"}


class RunAlerts:
    """The training loop calls one method per event. None of them raises or waits."""

    def __init__(
        self,
        sender: AlertSender | None = None,
        *,
        folder: Path = Path(),
        run_name: str = "",
        description: str = "",
        dollars_per_hour: float | None = None,
    ) -> None:
        self._sender = sender
        self._folder, self._run_name, self._description = folder, run_name, description
        self._dollars_per_hour = dollars_per_hour
        self._opened_at, self._first_step = perf_counter(), 0

    def begin(self, *, opened_at: float, first_step: int) -> None:
        """The time of this process, which continues a run of `first_step` steps, counts from then."""
        self._opened_at, self._first_step = opened_at, first_step

    def report_start(self, step: int, total_steps: int) -> None:
        if step >= total_steps:
            return
        how = (
            f"resumed at step {step} of {total_steps}" if step else f"started: {total_steps} steps"
        )
        self._send(
            lambda: Alert(
                kind=AlertKind.START,
                key=f"start/{step}",
                title=f"{self._run_name} {how}",
                text=self._description,
                step=step,
            )
        )

    def report_evaluation(self, step: int, names: Sequence[str]) -> None:
        """The verdict table of every set against step 0; at step 0 the scores."""

        def describe() -> Alert:
            reports = [
                report for name in names if (report := load_report(self._folder, name, step))
            ]
            comparisons = list(self._compare(reports)) if step else []
            if comparisons:
                title = " ".join(map(conclude, comparisons[:1]))
                text = comparison_table(comparisons)
            else:
                title, text = f"scores of {', '.join(names)}", score_table(reports)
            return Alert(
                kind=AlertKind.EVALUATION,
                key=f"evaluation/{step}",
                title=f"{self._run_name} step {step}: {title}",
                text=text,
                step=step,
            )

        self._send(describe)

    def report_warning(self, sentinel: str, step: int, found: str) -> None:
        """The first warning of a sentinel."""
        self._send(
            lambda: Alert(
                kind=AlertKind.SENTINEL,
                key=f"sentinel/{sentinel}",
                title=f"{self._run_name} step {step}: sentinel {sentinel} warns",
                text=found,
                step=step,
            )
        )

    def report_stop(self, error: BaseException, step: int) -> None:
        """A sentinel, an error or an interruption ended the run."""
        kind, how = AlertKind.FAILED, f"failed at step {step}: {type(error).__name__}"
        text = str(error)
        if isinstance(error, SentinelError):
            kind, how = AlertKind.SENTINEL, f"was stopped by a sentinel at step {step}"
        elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
            how, text = f"was interrupted at step {step}", "The same command resumes it."
        self._send(
            lambda: Alert(
                kind=kind,
                key=f"stopped/{step}/{type(error).__name__}",
                title=f"{self._run_name} {how}",
                text=text,
                step=step,
            )
        )

    def report_end(self, step: int, best_step: int, table: str) -> None:
        self._send(
            lambda: Alert(
                kind=AlertKind.END,
                key=f"end/{step}",
                title=f"{self._run_name} finished at step {step}; {self._describe_cost()}",
                text=table or f"best step {best_step}",
                step=step,
            )
        )

    def list_sent(self) -> dict[str, Any]:
        """For a checkpoint: what every receiver has got."""
        return {} if self._sender is None else self._sender.list_sent()

    def finish(self) -> None:
        """Take no further alerts; the deadline of `close` begins."""
        if self._sender is not None:
            self._sender.finish()

    async def close(self) -> None:
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close)

    def _send(self, describe: Callable[[], Alert]) -> None:
        if self._sender is None:
            return
        try:
            self._sender.send(describe())
        except Exception as error:
            logger.warning("no alert is sent: %s", error)

    def _compare(self, reports: Sequence[EvalReport]) -> Iterator[Comparison]:
        for report in reports:
            before = load_report(self._folder, report.name, 0)
            if before is not None:
                try:
                    yield compare(before, report)
                except TaskError as error:  # no task is graded in both
                    logger.info("%s is not in the alert: %s", report.name, error)

    def _describe_cost(self) -> str:
        """`2.5 h, 12.45 $`: this process, and the logged steps of those before it."""
        try:
            lines = (self._folder / "timing.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return "timing.jsonl cannot be read"  # the end is reported all the same
        earlier = [row for row in rows if row["step"] <= self._first_step and self._first_step]
        seconds = sum(row.get(key) or 0.0 for row in earlier for key in _TIMINGS)
        hours = (seconds + perf_counter() - self._opened_at) / 3600
        if self._dollars_per_hour is None:
            return f"{hours:.2f} h"
        return f"{hours:.2f} h, {hours * self._dollars_per_hour:.2f} $"


def build_alerts(config: RunConfig, sent: Mapping[str, Any] | None = None) -> RunAlerts:
    """`sent` is that of the checkpoint, for a folder that has no record of its own."""
    trainer, section = config.trainer, config.trainer.alerts
    folder, receivers = Path(trainer.run_path), list(_build_receivers(trainer))
    if not receivers:
        return RunAlerts()
    if trainer.resume_mode == "none":
        for receiver in receivers:
            (folder / f"{receiver.name}_{ALERTS_FILE}").unlink(missing_ok=True)
    return RunAlerts(
        AlertSender(receivers, folder, sent=sent),
        folder=folder,
        run_name=trainer.run_name,
        description=(
            f"{trainer.policy.model.path}, {trainer.algorithm.advantage_estimator}, "
            f"{trainer.train_batch_size} x {config.generator.n_samples_per_prompt} episodes per step"
        ),
        dollars_per_hour=section.dollars_per_hour,
    )


def check_watching(trainer: Trainer) -> None:
    """Raise for what cannot work: a webhook that is no URL, metrics for others without a token, a
    package that is not installed.
    """
    webhook = trainer.alerts.webhook_url
    if webhook and not webhook.get_secret_value().startswith(("http://", "https://")):
        raise ConfigError(
            "trainer.alerts.webhook_url does not begin with http:// or https://; give the whole URL"
        )
    needed = {
        "slack": trainer.alerts.slack_channel is not None and bool(os.environ.get(TOKEN_VARIABLE)),
        "prometheus": trainer.prometheus.port is not None,
        "otel": trainer.tracing,
    }
    for extra, is_needed in needed.items():
        if is_needed and not _is_installed(_PACKAGES[extra]):
            raise MissingExtraError(_PACKAGES[extra], extra)
    served = trainer.prometheus
    if served.port is not None:
        build_metrics_policy(served.host, token=read_token(), allowed_hosts=served.allowed_hosts)
        check_port(served.host, served.port)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def _build_receivers(trainer: Trainer) -> Iterator[AlertReceiver]:
    section, token = trainer.alerts, os.environ.get(TOKEN_VARIABLE)
    if section.slack_channel is not None and token:
        yield SlackReceiver(section.slack_channel, token=token)
    elif section.slack_channel is not None:
        logger.warning(
            "trainer.alerts.slack_channel=%s: %s is not set, so nothing is posted to Slack",
            section.slack_channel,
            TOKEN_VARIABLE,
        )
    if section.webhook_url is not None:
        yield WebhookReceiver(
            section.webhook_url.get_secret_value(),
            run_name=trainer.run_name,
            project_name=trainer.project_name,
        )
