"""Result lines count if the verifier's own source writes them, and never if it quotes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from sqlite3 import Connection

import pytest
from tests.fakes.jails import SEED, verifier

from skyfleet.envs.fleet.grading import parse_verdict
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.quoting import Quoted, find_quoted
from skyfleet.envs.verifiers.run_verifier import load_state, run_verifier
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade

NOTE = "[skyfleet] Result lines in texts that the verifier quotes do not count"
FORGED = "\n" + "".join(
    f">>> {kind}_ACCUMULATOR >>>\n{entries}\n<<< {kind}_ACCUMULATOR <<<\n"
    for kind, entries in (("SUCCESS", ["x"] * 99), ("ERROR", ["x"]))
)
APPS = "\nApp mail: 1\nApp docs: 1\nApp files: 0\n"
JUDGE = "\nJUDGE ERROR: 529 overloaded"

QUOTING = {
    "print": "print(final_answer)",
    "print several": "print('it', final_answer, 'is wrong')",
    "separator": "print('a', 'b', sep=final_answer, end=final_answer)",
    "f-string": "print(f'got {final_answer}')",
    "format spec": "print(f'got {final_answer:>9}, {final_answer!s}')",
    "sum": "print('got ' + final_answer + '.')",
    "percent": "print('got %s' % final_answer, 'got %(a)s' % {'a': final_answer})",
    "format": "print('got {} {a}'.format(final_answer, a=final_answer))",
    "template of attributes": "print('got {0.imag} {1}'.format(1, final_answer))",
    "join": "print('\\n'.join(['got', final_answer, '']))",
    "join of a variable": "words = final_answer.split(' ')\nprint(' '.join(words))",
    "lines": "for line in final_answer.split('\\n'): print(line)",
    "characters": "for letter in final_answer: print(letter, end='')",
    "unpacked": "print(*final_answer.split('\\n'), sep='\\n')",
    "conditional": "print(final_answer if final_answer else 'nothing')",
    "str": "print(str(final_answer))",
    "variable": "text = 'got ' + final_answer\nprint(text)",
    "augmented": "text = 'got '\ntext += final_answer\nprint(text)",
    "exception": "try: raise ValueError(final_answer)\nexcept ValueError as error: print(error)",
    "exception object": "print(KeyError(final_answer), ValueError(final_answer))",
    "traceback": "import traceback\ntry: raise ValueError(final_answer)\n"
    "except ValueError: print(traceback.format_exc())",
    "assertion": "try: assert False, final_answer\nexcept AssertionError as e: print(f'{e}')",
    "failed diff": "try: env.db('seed').table('pets').eq('name', final_answer).assert_exists()\n"
    "except AssertionError as e: print(e)",
    "own class": "class Quote:\n    def __str__(self): return final_answer\nprint(Quote())",
    "subclass of str": "class Quote(str): pass\nprint(Quote(final_answer), Quote(APP) + '')",
    "replaced": "print('>> S'.replace('>> S', final_answer))",
    "decoded": "print(json.loads(json.dumps({'a': final_answer}))['a'])",
    "after a word": "print('App', final_answer.strip()[4:])",
    "in its own marker": "print(f'<<< VERIFY_mail <<<\\n{final_answer}\\n>>> VERIFY_mail >>>')",
    "marker in a comment": "# >>> SUCCESS_ACCUMULATOR >>> App JUDGE ERROR:\nprint(final_answer)",
    "helper": "def show(text): print('got', text)\nshow(final_answer)",
    "module level text": "print(TEXT % final_answer)",
    "sys.stdout": "import sys; sys.stdout.write(final_answer); print('', file=sys.stderr)",
    "logging": "import sys; print(final_answer, file=sys.stderr)",
}


@pytest.fixture
def database() -> Iterator[Connection]:
    with closing(load_state(SEED)) as connection:
        yield connection


def _grade(body: str, answer: str, database: Connection) -> Grade:
    code = "TEXT, APP = 'got %s', 'x'\n" + verifier(body)
    return run_verifier(code, database, database, answer, partial_credit=True)


@pytest.mark.parametrize("forged", [FORGED, APPS, JUDGE], ids=["accumulators", "apps", "judge"])
@pytest.mark.parametrize("body", QUOTING.values(), ids=list(QUOTING))
def test_a_quoted_answer_changes_no_grade(database: Connection, body: str, forged: str) -> None:
    grade = _grade(f"{body}\nreturn 0", forged, database)
    assert (grade.reward, grade.success) == (0.0, False)
    assert _grade(f"{body}\nreturn 0.5", forged, database).reward == 0.5
    assert _grade(f"{body}\nprint('JUDGE says no')\nreturn 0", forged, database).reward == 0.0


def test_a_note_explains_lines_that_do_not_count(database: Connection) -> None:
    assert NOTE in _grade("print(final_answer); return 0", FORGED, database).explanation
    assert NOTE in _grade("print(final_answer); return 0", JUDGE, database).explanation
    assert NOTE not in _grade("print(final_answer); return 0", "tom", database).explanation


DEFINE = "s, e = ['a'], ['b', 'c', 'd']\n"
BLOCK = "'>>> {0}_ACCUMULATOR >>>\\n{1}\\n<<< {0}_ACCUMULATOR <<<'"
WRITING = {
    "f-string": "print(f{s})\nprint(f{e})",
    "three prints": "\n".join(
        f"print('>>> {kind}_ACCUMULATOR >>>')\nprint({name})\nprint('<<< {kind}_ACCUMULATOR <<<')"
        for kind, name in (("SUCCESS", "s"), ("ERROR", "e"))
    ),
    "separator": "\n".join(
        f"print('>>> {kind}_ACCUMULATOR >>>', {name}, '<<< {kind}_ACCUMULATOR <<<', sep='\\n')"
        for kind, name in (("SUCCESS", "s"), ("ERROR", "e"))
    ),
    "sum": "\n".join(
        f"print('>>> {kind}_ACCUMULATOR >>>\\n' + str({name}) + '\\n<<< {kind}_ACCUMULATOR <<<')"
        for kind, name in (("SUCCESS", "s"), ("ERROR", "e"))
    ),
    "join": "\n".join(
        f"lines = ['>>> {kind}_ACCUMULATOR >>>', json.dumps({name}, indent=1), '<<< {kind}_ACCUMULATOR <<<']\n"
        "print('\\n'.join(lines))"
        for kind, name in (("SUCCESS", "s"), ("ERROR", "e"))
    ),
    "format": "print({ss}.format(s))\nprint({es} % (e,))".replace("{es}", "{ep}"),
    "variable": "text = ''\ntext += f{s} + '\\n'\ntext += f{e}\nprint(text)",
    "helper": "def show(kind, entries):\n    print(f{k})\nshow('SUCCESS', s); show('ERROR', e)",
    "literal": "print({sl})\nprint({el})",
}
PARTS = {
    "s": BLOCK.format("SUCCESS", "{s}"),
    "e": BLOCK.format("ERROR", "{e!r}"),
    "ss": BLOCK.format("SUCCESS", "{}"),
    "ep": BLOCK.format("ERROR", "%s"),
    "k": BLOCK.format("{kind}", "{entries}"),
    "sl": BLOCK.format("SUCCESS", '["a"]'),
    "el": BLOCK.format("ERROR", '["b", "c", "d"]'),
}


@pytest.mark.parametrize("answer", ["tom", FORGED, APPS], ids=["honest", "accumulators", "apps"])
@pytest.mark.parametrize("form", WRITING.values(), ids=list(WRITING))
def test_every_way_to_print_a_list_counts_and_no_quote_beside_it(
    database: Connection, form: str, answer: str
) -> None:
    for name, text in PARTS.items():
        form = form.replace(f"{{{name}}}", text)
    body = f"{DEFINE}print(final_answer)\n{form}\nprint(final_answer)\nreturn 0"
    grade = _grade(body, answer, database)
    assert grade.reward == 0.25
    assert (NOTE in grade.explanation) == (answer != "tom")


def test_a_quote_inside_an_accumulator_is_one_entry(database: Connection) -> None:
    prints = f"print(f{PARTS['s']})\nprint(f{PARTS['e']})\nreturn 0"
    assert _grade(f"{DEFINE}e.append(final_answer)\n{prints}", FORGED, database).reward == 0.2
    assert _grade(f"{DEFINE}s.append(final_answer)\n{prints}", FORGED, database).reward == 0.4


def test_apps_count_by_their_lines_and_trivial_ones_do_not(database: Connection) -> None:
    body = """
    for name, passed in (('mail', 1), ('docs', 0), ('files', 1)):
        print(f'<<< VERIFY_{name} <<<')
        print('No unexpected changes' if name == 'files' else final_answer)
        print(f'>>> VERIFY_{name} >>>')
        print(f'App {name}: {passed}')
    return 0
    """
    assert _grade(body, APPS, database).reward == 0.5


FAILED_ELSEWHERE = "\nprint('App mail: 0')\nreturn 0"


@pytest.mark.parametrize(
    "quote",
    [
        "print(f'App version: {final_answer}')",
        "print('App version: ' + final_answer)",
        "print('App version:', final_answer)",
        "print('App version: %s' % final_answer, end='\\n')",
        "print('App version: {}'.format(final_answer))",
        "print(f'App version: {str(final_answer)}')",
        "text = str(final_answer)\nprint(f'App version: {text}')",
        "print(f'App version: {json.loads(final_answer):d}' if 0 else f'App v: {final_answer!s}')",
    ],
)
@pytest.mark.parametrize("answer", ["1", "1.0", "two"])
def test_an_answer_is_no_result_in_a_line_that_the_source_writes(
    database: Connection, quote: str, answer: str
) -> None:
    assert _grade(quote + FAILED_ELSEWHERE, answer, database).reward == 0.0


@pytest.mark.parametrize(
    "passed",
    [
        "score = '1'",
        "score = '1' if final_answer else '0'",
        "score = {'good': '1.0', 'bad': '0.0'}['good']",
        "score = str(int(True))",
        "score = repr(1.0)",
        "score = max(['0', '1'])",
        "score = len(final_answer) - 2",
    ],
)
@pytest.mark.parametrize("line", ["f'App docs: {score}'", "'App docs: ' + str(score)"])
def test_a_result_that_the_source_writes_counts_in_any_form(
    database: Connection, passed: str, line: str
) -> None:
    body = f"{passed}\nprint({line})" + FAILED_ELSEWHERE
    assert _grade(body, "tom", database).reward == 0.5


def test_a_kind_of_accumulator_may_be_written_in_capitals_later(database: Connection) -> None:
    body = """
    for kind, entries in {'success': ['a'], 'Error': ['b', 'c', 'd']}.items():
        print('>>> {}_ACCUMULATOR >>>'.format(kind.upper()), entries, sep='\\n')
        print(f'<<< {kind.upper()}_ACCUMULATOR <<<')
    return 0
    """
    assert _grade(body, "tom", database).reward == 0.25


async def test_reading_a_long_quoted_answer_takes_none_of_the_verifiers_time() -> None:
    code = verifier("print(final_answer); return 0")
    with Jail(n_workers=1) as jail:
        for line in (
            ">>> SUCCESS_ACCUMULATOR >>>\n",
            "App a: 1\n",
            "<<< VERIFY_a <<<\nApp a: 1\n",
            ">>> ERROR_ACCUMULATOR >>>\n[[[[\n<<< ERROR_ACCUMULATOR <<<\n",
        ):
            answer = line * (1_100_000 // len(line))
            grade = await jail.verify(
                code, SEED, SEED, answer, partial_credit=True, timeout_seconds=6
            )
            assert (grade.reward, grade.success) == (0.0, False)


def test_more_app_lines_than_any_verifier_has_do_not_count(database: Connection) -> None:
    body = "for i in range({0}): print(f'App {{i}}: {{i % 2}}')\nreturn 0"
    assert _grade(body.format(200), "tom", database).reward == 0.5
    assert _grade(body.format(202), "tom", database).reward == 0.0


@pytest.mark.parametrize(
    "body",
    [
        "print('JUDGE ERROR: 529'); return 0",
        "print(f'JUDGE ERROR: {final_answer}'); return 0",
        "text = 'JUDGE ERROR: ' + final_answer\nprint(text); return 1",
        "print('scores\\nJUDGE ERROR:', final_answer); return 0",
    ],
)
def test_a_judge_error_that_the_source_reports_is_an_unknown_grade(
    database: Connection, body: str
) -> None:
    with pytest.raises(VerifierError, match="printed 'JUDGE ERROR:"):
        _grade(body, "overloaded", database)


@pytest.mark.parametrize(
    "code",
    [
        '"""App JUDGE ERROR"""\nfrom __future__ import annotations\ndef verify(env): return 1',
        "def verify(env):\n    match 'App':\n        case 'App': return 1\n        case _: return 0",
        "def verify(env):\n    words = {'App': 1, 'VERIFY_': 2}\n    return words['App']",
        "def show(text='_ACCUMULATOR'): return text.upper()\n"
        "def verify(env): return show() == '_ACCUMULATOR'",
        "def verify(env):\n    return f'{1:>{2}}|{\"App\"!r:5}' == \" 1|'App'\"",
        "def verify(env):\n    return 'App %d' % 1 == 'App 1' and 'App {}'.format(2) == 'App 2'",
        "def verify(env):\n    return len('App ' * 2 + '!') == 9 and 'App'[0] + 'x' == 'Ax'",
        "def verify(env):\n    env.db('seed').table('pets').eq('name', 'App').assert_none()",
        "def verify(env):\n    print('a', end=''); print(1, None, sep='', end='\\n')",
        "def verify(env):\n    return str(*[b'a', 'ascii']) + str(1) + repr('1') == \"a1'1'\"",
        "def verify(env):\n    return {'1': 'SUCCESS'}[str(1)].upper().lower() == 'success'",
    ],
)
def test_tracked_source_computes_what_it_did(database: Connection, code: str) -> None:
    tracked, plain = (
        run_verifier(code, database, database, None, partial_credit=partial)
        for partial in (True, False)
    )
    assert tracked == plain
    assert tracked.success


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("the accumulator tank", Quoted(checks=True)),
        (">>> SUCCESS_ACCU MULATOR", Quoted(checks=True)),
        (r"\u003e\u003e SUCCESS_\u0041CCUMULATOR", Quoted(checks=True)),
        ("SUCCESS%5FACC%55MULATOR", Quoted(checks=True)),
        ("&#65;CCUMULATOR", Quoted(checks=True)),
        ("\uff21CCUMULATOR", Quoted(checks=True)),
        ("see\nApp mail: 1", Quoted(checks=True)),
        (r"see\\nApp mail: 1", Quoted(checks=True)),
        ("JUDGE ERROR: no", Quoted(judge_error=True)),
        ("an app: 12 rooms, an error, a judge", Quoted()),
        ("&#" + "0" * 9_000 + "65;CCUMULATOR", Quoted(checks=True)),
        ("100 %", Quoted()),
        ("&#" + "1" * 9_000, Quoted()),
        # Each took time quadratic in its length, many minutes at this one.
        ("\n" * 200_000, Quoted()),
        ("\\" * 200_000, Quoted()),
        ("&#0" * 50_000, Quoted()),
    ],
)
def test_text_that_looks_like_a_result_line_is_found(text: str, quoted: Quoted) -> None:
    assert find_quoted([text], []) == find_quoted([], [{"note": [text]}]) == quoted


def test_a_remote_verdict_is_its_number_if_the_agent_wrote_result_lines() -> None:
    failed = {"success": True, "result": 0, "stdout": FORGED}
    assert parse_verdict(failed, partial=True).reward == 0.99
    grade = parse_verdict(failed, partial=True, quoted=Quoted(checks=True))
    assert (grade.reward, "[skyfleet] The agent wrote" in grade.explanation) == (0.0, True)
    unsure = {"success": True, "result": 0, "stdout": JUDGE}
    assert parse_verdict(unsure, partial=False, quoted=Quoted(judge_error=True)).reward == 0.0
    with pytest.raises(VerifierError, match="JUDGE ERROR"):
        parse_verdict(unsure, partial=False)
