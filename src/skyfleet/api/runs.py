"""Run folders: read the metrics, reports, trajectories and checkpoints that a run wrote."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from skyfleet.analysis.run_folder import RunFolder, open_run
from skyfleet.api.comparison import Comparison, Evaluation, compare_reports
from skyfleet.api.inference import inference_config
from skyfleet.api.models import ModelSource, find_run_policy, list_checkpoints
from skyfleet.api.policy import Policy
from skyfleet.api.tables import Table
from skyfleet.api.trajectories import Trajectories
from skyfleet.config.keys import flatten
from skyfleet.errors import ConfigError
from skyfleet.trajectories.entry import Entry

if TYPE_CHECKING:
    from skyfleet.analysis.viewer.server import ViewerAccess


class Run:
    """A run folder. It can be read while the run still trains.

    >>> import skyfleet as sf
    >>> sf.load_run("runs/unknown")
    Traceback (most recent call last):
    ...
    skyfleet.errors.ConfigError: runs/unknown is not a run folder: ...
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.path = folder.path

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def config(self) -> dict[str, Any]:
        """Every configuration key with its value."""
        return flatten(self._folder.config)

    @property
    def metrics(self) -> Table:
        """One row per step."""
        return Table.from_rows(self._folder.metrics())

    @property
    def timing(self) -> Table:
        """Seconds per step and phase."""
        return Table.from_rows(self._folder.timing())

    @property
    def evaluations(self) -> dict[str, dict[int, Evaluation]]:
        """By evaluation set, then by step."""
        return {
            name: {step: Evaluation(report) for step, report in sorted(by_step.items())}
            for name, by_step in self._folder.reports().items()
        }

    @property
    def comparison(self) -> Comparison:
        """Every evaluation set at its first step and at its last."""
        reports = self._folder.reports()
        pairs = [(r[min(r)], r[max(r)]) for r in reports.values() if len(r) > 1]
        once = [
            f"{name} was evaluated at one step only." for name, r in reports.items() if len(r) == 1
        ]
        none = "No evaluation set: pass eval=tasks to compare the policy before and after."
        return compare_reports(pairs, once if reports else [none])

    @property
    def checkpoints(self) -> dict[int, Path]:
        """By step."""
        configured = Path(self._folder.config.trainer.ckpt_path)
        return dict(sorted(list_checkpoints(configured, self.path).items()))

    @property
    def run_folder(self) -> Path:
        return self.path

    @property
    def source(self) -> ModelSource:
        return find_run_policy(self.path)

    def policy(self, step: int | str = "last") -> Policy:
        """The policy of a checkpoint: a step, "last" or "best"."""
        source = find_run_policy(self.path, step)
        return Policy(source, inference_config(source, None))

    def trajectories(
        self,
        *,
        env: str | None = None,
        passed: bool | None = None,
        step: int | str | None = None,
        kind: str | None = None,
        eval_set: str | None = None,
        task: str | None = None,
    ) -> Trajectories:
        """The stored episodes, training first. `step` is a number or "last"; `kind` train or eval."""
        entries = self._folder.entries()
        if env is not None and entries:
            _check_known("env", env, {entry.env_key for entry in entries})
        if eval_set is not None and entries:
            _check_known("eval_set", eval_set, {e.set_name for e in entries if e.set_name})

        def matches(entry: Entry) -> bool:
            return (
                env in (None, entry.env_key)
                and kind in (None, entry.kind)
                and eval_set in (None, entry.set_name)
                and task in (None, entry.task_key)
                and (passed is None or entry.success is passed)
            )

        found = [entry for entry in entries if matches(entry)]
        if step is not None:
            last = max((entry.step for entry in found), default=0)
            found = [entry for entry in found if entry.step == (last if step == "last" else step)]
        return Trajectories(found)

    def report(self, *others: Run, output: str | Path | None = None) -> Report:
        """Write the run's report, one HTML page; other runs are compared with this one.

        output: a file, or a folder for report.html; unset, the run folder.
        """
        from skyfleet.analysis.html.page import write_report

        page = self.find_report_path(output)
        write_report([self._folder, *(other._folder for other in others)], page)
        return Report(page)

    def find_report_path(self, output: str | Path | None = None) -> Path:
        """Where `report` writes the page."""
        page = self.path if output is None else Path(output)
        return page / "report.html" if page.is_dir() else page

    def view(
        self,
        *,
        port: int = 0,
        open_browser: bool = True,
        episode: str | None = None,
        host: str = "127.0.0.1",
        token: str | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> Viewer:
        """Start the trajectory viewer in the background and open it in the browser.

        `episode` opens one, such as eval/val/40/3. A browser logs in once with the `token`, if there
        is one; a `host` beyond this machine needs it. `allowed_hosts` are further names that browsers
        may use for this viewer. In a script, `run.view().wait()`.
        """
        from skyfleet.analysis.viewer.server import ViewerAccess
        from skyfleet.serving.access import is_loopback
        from skyfleet.trajectories.index import find_entry

        if token is None and not is_loopback(host):
            raise ConfigError(
                f"run.view(host={host!r}) lets other machines read the run; pass token=, or use "
                "host='127.0.0.1'"
            )
        access = ViewerAccess(host, token=token, allowed_hosts=allowed_hosts)
        if episode is not None:
            find_entry(self._folder.trajectories, episode)  # fails now if there is none
        viewer = Viewer(self._folder, port, episode=episode, access=access)
        if open_browser:
            viewer.open()
        return viewer

    def __repr__(self) -> str:
        rows = self._folder.metrics()
        last = int(rows[-1]["step"]) if rows else 0
        return f"Run({str(self.path)!r}, step={last}, checkpoints={list(self.checkpoints)})"

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>{self.comparison._repr_html_()}"


def load_run(path: str | Path) -> Run:
    """Open a run folder, such as runs/notes, or one in a bucket, such as s3://bucket/runs/notes.

    >>> import skyfleet as sf
    >>> def loud(answer):
    ...     return float(answer.isupper())
    >>> tasks = [{"prompt": f"Shout the number {n}."} for n in range(4)]
    >>> settings = {"generator.max_num_seqs": 8, "trainer.policy.model_config_kwargs": {"hidden_size": 32}}
    >>> result = sf.train("tiny", reward=loud, tasks=tasks, steps=1, batch_size=2, eval=False,
    ...                   algorithm=sf.GRPO(group_size=2), sampling=sf.Sampling(max_tokens=4),
    ...                   run_dir="runs/shout", config=settings)
    >>> run = sf.load_run("runs/shout")
    >>> run.trajectories(kind="train", step="last")
    Trajectories(4 episodes, 0 passed)
    >>> run.metrics["step"]
    [0, 1]
    """
    return Run(open_run(path))


class Report:
    """A report page on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        """Open the page in the browser."""
        webbrowser.open(self.path.resolve().as_uri())

    def __repr__(self) -> str:
        return f"Report({str(self.path)!r})"

    def _repr_html_(self) -> str:
        uri = escape(self.path.resolve().as_uri())
        return f"<p>Report: <a href='{uri}'>{escape(str(self.path))}</a></p>"


class Viewer:
    """The trajectory viewer, serving in the background; `stop` ends it, `wait` blocks until Ctrl-C."""

    def __init__(
        self,
        folder: RunFolder,
        port: int,
        *,
        episode: str | None = None,
        access: ViewerAccess,
    ) -> None:
        from skyfleet.analysis.viewer.api import Viewer as ViewerApi
        from skyfleet.analysis.viewer.server import ViewerServer

        self._api = ViewerApi(folder)
        self._server = ViewerServer(self._api, port, access=access)
        self.root_url = self._server.url
        """The address of the viewer; `url` is that of the episode to open, if one was named."""
        self.url = self._server.episode_url(episode) if episode is not None else self.root_url
        self._thread = Thread(
            target=self._server.serve_forever, name="skyfleet viewer", daemon=True
        )
        self._thread.start()

    def open(self) -> None:
        """Open the viewer in the browser."""
        webbrowser.open(self.url)

    def wait(self) -> None:
        """Block until Ctrl-C, then stop."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._api.close()

    def __repr__(self) -> str:
        return f"Viewer({self.url!r})"

    def _repr_html_(self) -> str:
        return f"<p>Viewer: <a href='{escape(self.url)}'>{escape(self.url)}</a></p>"


def _check_known(argument: str, value: str, known: set[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"run.trajectories({argument}={value!r}): choose from {', '.join(sorted(known))}"
        )
