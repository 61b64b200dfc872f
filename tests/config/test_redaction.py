"""Secrets inside values, URLs, commands and texts are redacted, and kept by reference for resuming."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyfleet.config.keys import diff, dump_yaml, flatten
from skyfleet.config.loading import load_config, load_config_file, load_recorded_config
from skyfleet.config.redaction import differs_in_secrets_only, redact_config, reject_missing_secrets
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, EnvError, ModelError
from skyfleet.evaluation.agent_info import AgentInfo
from skyfleet.redaction import (
    hash_secret,
    redact,
    redact_patterns,
    redact_value,
)
from skyfleet.secret_names import looks_secret
from skyfleet.terminal import RedactingFilter
from skyfleet.trajectories.trajectory import Failure

SECRET = "hunter2hunter2"
MARK = hash_secret(SECRET)


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "DB_PASSWORD",
        "api_key",
        "apiKey",
        "X-Auth-Token",
        "client_secret",
        "key",
        "token",
        *("PGPASSWORD", "dbpassword", "ROOTPASSWORD", "passwords", "MYSQL_PWD", "dbpwd", "db_pw"),
        *("pass", "DB_PASS", "db_pass", "SMTP_PASS", "userPass", "SSHPASS", "privatekey"),
        *("api_tokens", "auth_tokens", "clientsecret", "cookies"),
        *("SLACK_BOT_TOKEN", "WANDB_API_KEY", "WANDB_API_KEY_TOOL_USE"),
    ],
)
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "eos_token",
        "stop_token_ids",
        "task_key",
        "env_key",
        "password_file",
        "keyboard",
        *("n_tokens", "prompt_tokens", "PGPASSFILE", "GIT_ASKPASS", "OLDPWD", "compass", "bypass"),
        *("api_key_file", "AWS_ACCESS_KEY_ID"),
        *("FAIL_TO_PASS", "avg_pass_at_4", "pass_threshold", "pass_rate", "forward_pass", "passes"),
    ],
)
def test_other_names_are_not(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host:80/path?x=1",
        f"wss://{SECRET}@host/ws",
        f"redis://:{SECRET}@host",
        f"me:{SECRET}@host:80",
        f"postgres://me:{SECRET}@host/db failed",
        f"https://host/?token={SECRET}&count=9",
        f"https://host/?key={SECRET}",
        f"s3://bucket/key?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}",
        f"server --password {SECRET} --port 80",
        f"server --api-key={SECRET}",
        f"env DB_PASSWORD={SECRET} run",
        f"Authorization: Bearer {SECRET}",
        f"curl -H 'X-Api-Key: {SECRET}'",
        f"env_config={{'password': '{SECRET}', 'count': 9}}",
        f'{{"api_key": "{SECRET}"}}',
        f"environment.x.api_key={SECRET!r} is unknown",
        f"serve --verbose --password {SECRET}",
        f"serve -q --password={SECRET}",
        f"-v --api-key {SECRET}",
        f"serve --pass {SECRET}",
        f"serve --password 'with spaces {SECRET}' --port 80",
        f'PASSWORD="with spaces {SECRET}" run',
        f"PASSWORD=semi;{SECRET}; run",
        f'bash -c "serve --verbose --password {SECRET}"',
        f"x --command='serve --token {SECRET}'",
        f"COMMAND='PASSWORD={SECRET} run'",
        f'{{"password": "quote \\" {SECRET}", "x": "y"}}',
        f"https://me:a{hash_secret('b')}{SECRET}@host/",
        f"Command '['serve', '-v', '--password', '{SECRET}']' returned 1",
        f"Driver={{ODBC}};Server=h;UID=sa;PWD={SECRET}",
        f"Server=h;User Id=sa;Password={SECRET};Encrypt=yes",
        f"jdbc:sqlserver://h;user=u;password={SECRET}",
        f"https://host/?user=u;token={SECRET}",
        f"https://host/?pass={SECRET}",
        f"//me:{SECRET}@host/path",
        f"Cookie: a=b; session={SECRET}",
        f"Set-Cookie: theme=x; sid={SECRET}; Path=/",
        f"mysql -uroot -p{SECRET} db",
        f"sshpass -p {SECRET} ssh -p 22 host",
        f"curl -u me:{SECRET} http://h",
        f"curl -ume:{SECRET}",
        f"curl --user=me:{SECRET}",
        f"redis-cli -h host -a {SECRET}",
        f"https://hooks.slack.com/services/T00000000/B00000000/{SECRET}",
        f"https://api.telegram.org/bot123456:{SECRET}/sendMessage",
        f"PGPASSWORD={SECRET} psql",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "sk-abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_a_secret_in_a_text_is_replaced_and_stays_replaced(text: str) -> None:
    redacted = redact_patterns(text)
    assert SECRET not in redacted
    assert "<redacted sha256:" in redacted
    assert redact_patterns(redacted) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "world:github?split=train&count=9",
        "http://127.0.0.1:8000/v1",
        "http://host:8080/@scope/package",
        "ws://[::1]:80/x",
        "write it as key=value",
        "trainer.train_batch_size=30 is not divisible by policy_mini_batch_size=8",
        "task_key='github-close-1' is unknown; did you mean 'github-close-2'?",
        "eos_token=<|im_end|>",
        "https://user:${oc.env:PW}@host",
        "pass=12 fail=3, eval_pass=0.43, PASS=12/20, pass=true",
        "docker run --name mysql -p 3306:3306 mysql:8 --verbose",
        "docker run --user 1000:1000 curlimages/curl --verbose http://h",
        "x --verbose --debug run; a;b;c",
    ],
)
def test_other_texts_are_unchanged(text: str) -> None:
    assert redact_patterns(text) == text


@pytest.mark.parametrize(
    "part",
    [
        *(
            "a",
            "a.",
            "a+a:",
            "x://a:",
            "//a:",
            "'a': '",
            "--token ",
            "--a ",
            "a=",
            "eyJ-",
            "sk-",
            "=",
        ),
        *("?a&", "@a:", "curl -u ", "mysql -p", "cookie: a=b;", ";a=b", "a='b ", "token=a;"),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "api.telegram.org/bot1:"),
    ],
)
def test_a_long_text_takes_time_in_proportion_to_its_length(part: str) -> None:
    assert redact(part * (60_000 // len(part)))  # bounded repetitions: not quadratic


@pytest.mark.parametrize(
    ("command", "redacted"),
    [
        (["mysql", f"-p{SECRET}"], ["mysql", f"-p{MARK}"]),
        (["sshpass", "-p", SECRET, "ssh", "-p", "22"], ["sshpass", "-p", MARK, "ssh", "-p", "22"]),
        (["serve", "--token", SECRET], ["serve", "--token", MARK]),
        (["curl", "-u", f"me:{SECRET}"], ["curl", "-u", f"me:{MARK}"]),
        (["curl", f"-ume:{SECRET}"], ["curl", f"-ume:{MARK}"]),
        (["curl", f"--user=me:{SECRET}"], ["curl", f"--user=me:{MARK}"]),
        (["curl", "-H", f"X-Token: {SECRET}"], ["curl", "-H", f"X-Token: {MARK}"]),
        (["redis-cli", "-a", SECRET, "ping"], ["redis-cli", "-a", MARK, "ping"]),
        (["curl", "-u", f":{SECRET}"], ["curl", "-u", f":{MARK}"]),
        (["ls", "-a", "folder"], ["ls", "-a", "folder"]),
        (["docker", "run", "--user", "1000:1000"], ["docker", "run", "--user", "1000:1000"]),
        (["serve", "--verbose", "--pass", SECRET], ["serve", "--verbose", "--pass", MARK]),
        (["bash", "-c", f"mysql -p{SECRET} db"], ["bash", "-c", f"mysql -p{MARK} db"]),
        (["sh", "-c", f"curl -u me:{SECRET} h"], ["sh", "-c", f"curl -u me:{MARK} h"]),
        (["sh", "-c", f"serve -v --password {SECRET}"], ["sh", "-c", f"serve -v --password {MARK}"]),
        (["docker", "-p", "80:80", "-e", f"TOKEN={SECRET}"], ["docker", "-p", "80:80", "-e", f"TOKEN={MARK}"]),
        (["sh", "-c", f"export KEY_ID=a PASSWORD={SECRET}; run"], ["sh", "-c", f"export KEY_ID=a PASSWORD={MARK}; run"]),
    ],
)  # fmt: skip
def test_a_secret_in_a_command_is_replaced(command: list[str], redacted: list[str]) -> None:
    assert redact_value(command) == redacted == redact_value(redacted)


def test_a_default_configuration_has_nothing_to_redact() -> None:
    assert redact_config(RunConfig()) == RunConfig().model_dump(mode="json")


SETTINGS = {
    "environment.mcp.url": f"https://bot:{SECRET}@host/mcp",
    "environment.mcp.command": f"['serve', '--token', '{SECRET}']",
    "environment.mcp.headers.Authorization": f"Bearer {SECRET}",
    "environment.mcp.environment.TOKEN": SECRET,
    "environment.openenv.base_url": f"http://host/?token={SECRET}",
    "environment.openenv.headers.Authorization": f"Bearer {SECRET}",
    "environment.skyrl_gym.env_config.password": SECRET,
    "environment.skyrl_gym.env_config.database.secret": SECRET,
    "environment.skyrl_gym.env_config.db_pass": SECRET,
    "environment.skyrl_gym.env_config.PGPASSWORD": SECRET,
    "environment.skyrl_gym.env_config.api_tokens": f"['{SECRET}']",
    "environment.skyrl_gym.env_config.odbc": f"'Server=h;UID=sa;PWD={SECRET}'",
    "environment.skyrl_gym.env_config.dsn": f"postgres://me:{SECRET}@host/db",
    "environment.skyrl_gym.fleet_task.api_key": SECRET,
    "generator.remote_inference_engine_urls": f"['me:{SECRET}@host:80', 'http://u:{SECRET}@h/v1']",
    "generator.engine_init_kwargs.hf_token": SECRET,
    "data.train_data": f"['s3://bucket/tasks?X-Amz-Signature={SECRET}']",
}


def load(key: str, value: str) -> RunConfig:
    backend = "openai" if key == "generator.remote_inference_engine_urls" else "embedded"
    return load_config("", [f"generator.backend={backend}", f"{key}={value}"])


@pytest.mark.parametrize("key", SETTINGS)
def test_a_stored_configuration_holds_a_hash_and_asks_for_the_secret(
    key: str, tmp_path: Path
) -> None:
    config = load(key, SETTINGS[key])
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    assert SECRET not in path.read_text() + str(flatten(config))
    stored = load_recorded_config(path)
    assert dump_yaml(stored) == path.read_text()
    assert diff(stored, config) == {}
    with pytest.raises(
        ConfigError, match=rf"^{key}.* holds a redacted secret; give it again as {key}"
    ):
        load_config_file(path)
    assert diff(load_config_file(path, [f"{key}={SETTINGS[key]}"]), config) == {}
    other = load(key, SETTINGS[key].replace(SECRET, "other" * 3))
    ((changed, values),) = diff(stored, other).items()
    assert differs_in_secrets_only(changed, *values)


@pytest.mark.parametrize("key", SETTINGS)
def test_a_secret_from_the_environment_is_stored_as_its_reference(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", SECRET)
    config = load(key, SETTINGS[key].replace(SECRET, "${oc.env:CANARY}"))
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    assert SECRET not in path.read_text()
    assert "${oc.env:CANARY}" in path.read_text()
    assert load_config_file(path) == config
    assert diff(load_recorded_config(path), config) == {}
    monkeypatch.delenv("CANARY")
    with pytest.raises(
        ConfigError, match=rf"{key}.* refers to \$\{{oc\.env:CANARY\}}, which is not set"
    ):
        load_config_file(path)
    assert dump_yaml(load_recorded_config(path)) == path.read_text()


def test_a_difference_beside_the_secret_is_a_difference() -> None:
    one, other = f"https://bot:{MARK}@host/mcp", "https://bot:${oc.env:PW}@elsewhere/mcp"
    key = "environment.mcp.url"
    assert not differs_in_secrets_only(key, one, other)
    assert not differs_in_secrets_only(key, one, one)
    assert differs_in_secrets_only(key, [one], ["https://bot:${oc.env:PW}@host/mcp"])
    assert differs_in_secrets_only(key, "Bearer ${oc.env:PW}", MARK)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("environment.mcp.environment", "LEVEL"),
        ("environment.mcp.headers", "X-Split"),
        ("environment.openenv.headers", "X-Split"),
    ],
)
def test_a_masked_value_whose_name_is_not_a_secret_is_a_setting(key: str, name: str) -> None:
    def differs(before: dict[str, str], now: dict[str, str]) -> bool:
        ((changed, values),) = diff(
            *(load_config("", [f"{key}={settings}"]) for settings in (before, now))
        ).items()
        return differs_in_secrets_only(changed, *values)

    easy, hard = {name: "easy", "TOKEN": SECRET}, {name: "hard", "TOKEN": SECRET}
    assert not differs(easy, hard)
    assert differs(easy, {name: "easy", "TOKEN": "renewed"})
    assert not differs(easy, {"TOKEN": SECRET})


def test_a_masked_value_may_move_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSN", f"postgres://me:{SECRET}@host/db")
    key, before = "environment.mcp.environment", {"DSN": MARK}
    now = flatten(load(key, "{DSN: '${oc.env:DSN}'}"))[key]
    assert differs_in_secrets_only(key, before, now)


def test_a_stored_secret_is_not_sent_to_a_server() -> None:
    stored = load_config("", ["environment.mcp.url=https://host"])
    mcp = stored.environment.mcp.model_copy(update={"url": f"https://bot:{MARK}@host"})
    with pytest.raises(ConfigError, match=r"^environment\.mcp\.url holds a redacted secret"):
        reject_missing_secrets("environment.mcp", mcp)
    mcp = stored.environment.mcp.model_copy(update={"url": "https://bot:${oc.env:PW}@host"})
    with pytest.raises(ConfigError, match="set the environment variable PW"):
        reject_missing_secrets("environment.mcp", mcp)


def test_a_secret_of_the_configuration_is_redacted_wherever_it_occurs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = "a canary in p%40ss"
    load_config("", [f"environment.skyrl_gym.env_config.password={secret}"])
    load_config("", [f"environment.mcp.url=https://bot:{SECRET}@host"])
    for text in (secret, "a canary in p@ss", SECRET):
        assert text not in redact(f"login failed with {text} (401)")
        assert text not in Failure.of(OSError(f"refused {text}")).detail
        assert text not in Failure.of(EnvError(f"step: OSError: refused {text}")).detail
        assert text not in str(ModelError(f"cannot load {text}"))
        assert text in str(EnvError(f"a tool answers {text}")), "agents see it unchanged"
        logging.getLogger("skyfleet.test").warning("refused %s\x1b[2J", text)
        RedactingFilter().filter(caplog.records[-1])
        assert text not in caplog.records[-1].getMessage()
        assert "\x1b" not in caplog.records[-1].getMessage()


def test_secrets_of_environment_variables_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "value-of-a-variable")
    monkeypatch.setenv("PWD", "/home/somebody/work")
    load_config("")
    assert "value-of-a-variable" not in redact("the key value-of-a-variable is wrong")
    assert redact("in /home/somebody/work") == "in /home/somebody/work"


def test_errors_of_loading_show_no_secret() -> None:
    for override in (
        f"environment.mcp.url=[https://bot:{SECRET}@host]",
        f"environment.mcp.call_timeout_seconds=https://bot:{SECRET}@host",
        f"environment.mcp.api_key={SECRET}",
        f"environment.skyrl_gym.fleet_task.api_kee={SECRET}",
        f"environment.skyrl_gym.env_config=password={SECRET}",
    ):
        with pytest.raises(ConfigError) as refused:
            load_config("", [override])
        assert SECRET not in str(refused.value)


def test_masks_of_earlier_versions_are_asked_for_too() -> None:
    old: dict[str, Any] = {"environment": {"mcp": {"headers": {"Authorization": "**********"}}}}
    with pytest.raises(ConfigError, match="holds a redacted secret"):
        load_config(yaml.safe_dump(old))


def test_a_report_does_not_show_the_password_of_an_endpoint() -> None:
    info = AgentInfo(model="m", endpoint=f"https://bot:{SECRET}@host/v1", max_turns=3)
    assert info.endpoint == f"https://bot:{MARK}@host/v1"
    assert AgentInfo(**asdict(info)) == info
