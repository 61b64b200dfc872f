"""Try to get out of the verifiers' jail in every known way, with and without bubblewrap."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from platform import machine, release
from textwrap import indent

from benchmarks.jail_attempts import ANSWER, ATTEMPTS, PRELUDE, Attempt

from skyfleet.envs.verifiers.confinement import probe_confinement
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.jail_protocol import pack_frame, pack_verdict
from skyfleet.envs.verifiers.run_verifier import Verdict
from skyfleet.errors import VerifierError

NO_BWRAP = "/not/installed/bwrap"
HONEST = "def verify(env, final_answer=None): return 0.25"
TIMEOUT_SECONDS = 1.0
_FORGED = pack_frame(pack_verdict(Verdict(reward=1.0, stdout="")))
_LEFT_BEHIND = [f"{folder}/escaped" for folder in ("/tmp", "/dev/shm")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an attempt must not change or contact."""

    canary: Path
    servers: Sequence[socket.socket]
    port: int
    name: str

    def find_damage(self) -> list[str]:
        damage = [path for path in _LEFT_BEHIND if os.path.exists(path)]
        if self.canary.read_text() != "canary" or os.listdir(self.canary.parent) != ["canary"]:
            damage.append("the file changed")
        for server in self.servers:
            try:
                server.recv(1) if server.type == socket.SOCK_DGRAM else server.accept()
            except BlockingIOError:
                continue
            damage.append("a server was contacted")
        return damage


@contextmanager
def open_host() -> Iterator[Host]:
    """A file, a TCP, a UDP and an abstract server, and a secret in the environment."""
    with ExitStack() as closing_all, tempfile.TemporaryDirectory() as folder:
        tcp = closing_all.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = tcp.getsockname()[1]
        udp = closing_all.enter_context(closing(socket.socket(type=socket.SOCK_DGRAM)))
        udp.bind(("127.0.0.1", port))
        abstract = closing_all.enter_context(closing(socket.socket(socket.AF_UNIX)))
        name = f"skyfleet-{os.getpid()}-{port}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        for server in (tcp, udp, abstract):
            server.setblocking(False)
        canary = Path(folder, "canary")
        canary.write_text("canary")
        os.environ["SECRET_OF_THE_RUN"] = "hunter2"
        closing_all.callback(os.environ.pop, "SECRET_OF_THE_RUN")
        yield Host(canary=canary, servers=(tcp, udp, abstract), port=port, name=name)


async def find_escape(attempt: Attempt, jail: Jail, host: Host) -> str:
    """Return what the attempt achieved; empty if it was contained."""
    names = f"CANARY, PORT, NAME, FORGED = {str(host.canary)!r}, {host.port}, {host.name!r}, {_FORGED!r}"
    ending = "" if attempt.quotes else "\nreturn 1"
    signature = "def verify(env, final_answer=None, conversation=None):\n"
    code = f"{PRELUDE}{names}\n{signature}{indent(attempt.body + ending, '    ')}"
    # Another task's verification comes before and after, on the same worker.
    before = await jail.verify(HONEST, b"", b"", "SECRET_OF_ANOTHER task " * 20)
    pids = jail.pids
    answer, reward = (ANSWER if attempt.quotes else "x"), None
    try:
        grade = await jail.verify(
            code,
            b"",
            b"",
            answer,
            answer,
            partial_credit=attempt.quotes,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        reward = grade.reward
    except VerifierError:
        pass
    after = await jail.verify(HONEST, b"", b"", None)
    found = host.find_damage()
    if attempt.quotes and reward != 0.0:
        found.append(f"the answer made the reward {reward}")
    if reward:
        found.append(f"it ran to its end: {grade.explanation[:200]}")
    if (before.reward, after.reward) != (0.25, 0.25):
        found.append(f"another task's reward is {before.reward}, then {after.reward}")
    if jail.pids != pids:
        found.append("the worker was replaced")
    return "; ".join(found)


async def run_attempts(bwrap: str, attempts: Sequence[Attempt]) -> dict[str, list[str]]:
    """Return per group what got out."""
    escapes: dict[str, list[str]] = {attempt.group: [] for attempt in attempts}
    with open_host() as host, Jail(n_workers=1, bwrap=bwrap) as jail:
        for attempt in attempts:
            if escape := await find_escape(attempt, jail, host):
                escapes[attempt.group].append(f"{attempt.name}: {escape}")
    return escapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", help="only these attempts, such as harness")
    group: str | None = parser.parse_args().group
    attempts = [attempt for attempt in ATTEMPTS if group in (None, attempt.group)]
    found = probe_confinement()
    results = {"without bubblewrap": asyncio.run(run_attempts(NO_BWRAP, attempts))}
    if found.bwrap is None:
        print(f"bubblewrap does not work here: {found.bwrap_problem}")
    else:
        results["with bubblewrap"] = asyncio.run(run_attempts("bwrap", attempts))
    n_attempts = Counter(attempt.group for attempt in attempts)
    print(f"`python -m benchmarks.jail_escapes`: Linux {release()} {machine()}\n")
    print(f"| attempts | number | {' | '.join(f'out {kind}' for kind in results)} |")
    print("|---" * (2 + len(results)) + "|")
    for group, count in n_attempts.items():
        out = " | ".join(str(len(result[group])) for result in results.values())
        print(f"| {group} | {count} | {out} |")
    totals = [sum(map(len, result.values())) for result in results.values()]
    print(f"| all | {len(attempts)} | {' | '.join(map(str, totals))} |")
    for kind, result in results.items():
        for name, escapes in result.items():
            for escape in escapes:
                print(f"{kind}, {name}: {escape}")
    raise SystemExit(any(totals))


if __name__ == "__main__":
    main()
