"""Github: repositories, their issues, labels and comments."""

from __future__ import annotations

from random import Random
from typing import Literal

from skyfleet.envs.tools import ToolError, check_known, shown
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

github = World(
    "github",
    """
    create table users (name text primary key);
    create table repos (name text primary key);
    create table issues (
        number integer primary key, repo text, title text, state text, assignee text
    );
    create table labels (repo text, name text, primary key (repo, name));
    create table issue_labels (number integer, label text, primary key (number, label));
    create table comments (
        id integer primary key, number integer, author text, body text, created_on text
    );
    """,
)

State = Literal["open", "closed"]


@github.seeder
def fill(app: App, rng: Random) -> None:
    people = [app.user, *rng.sample([name for name in vocabulary.PEOPLE if name != app.user], 4)]
    for name in people:
        app.db.insert("users", name=name)
    numbers = iter(rng.sample(range(1, 25), 24))
    for repo in rng.sample(vocabulary.REPOS, 3):
        app.db.insert("repos", name=repo)
        labels = rng.sample(vocabulary.LABELS, 3)
        for label in labels:
            app.db.insert("labels", repo=repo, name=label)
        team = rng.sample(people, 3)
        states = ["open"] * rng.randint(3, 5) + ["closed"] * rng.randint(2, 3)
        rng.shuffle(states)
        titles = rng.sample(vocabulary.ISSUE_TITLES.in_family(app.family), len(states))
        for title, state in zip(titles, states, strict=True):
            issue = {"number": next(numbers), "repo": repo, "title": title, "state": state}
            number = app.db.insert("issues", **issue, assignee=rng.choice([*team, None]))
            if rng.random() < 0.3:
                app.db.insert("issue_labels", number=number, label=rng.choice(labels))
            for _ in range(rng.randint(0, 2)):
                _insert_comment(app, number, rng.choice(people), rng.choice(vocabulary.REMARKS))


@github.reads
def list_issues(app: App, repo: str, state: State = "open") -> list[Row]:
    """List issues, oldest first."""
    check_known("repo", repo, _names(app, "repos"))
    columns = ("title", "number", "assignee")
    return [{name: issue[name] for name in columns} for issue in _issues(app, repo, state)]


@github.reads
def get_issue(app: App, number: int) -> Row:
    """Show an issue."""
    _issue(app, number)
    return app.db.rows(
        "select number, title, state, assignee,"
        " (select group_concat(label, ' ') from issue_labels l where l.number = i.number) as labels,"
        " (select author || ': ' || body from comments c where c.number = i.number"
        " order by id desc limit 1) as last_comment from issues i where number = ?",
        number,
    )[0]


@github.writes
def update_issue(
    app: App, number: int, state: State | None = None, assignee: str | None = None
) -> None:
    """Close, reopen or assign."""
    _issue(app, number)
    if state is None and assignee is None:
        raise ToolError("nothing to change; give state or assignee")
    if state is not None:
        app.db.write("update issues set state = ? where number = ?", state, number)
    if assignee is not None:
        check_known("user", assignee, _names(app, "users"))
        app.db.write("update issues set assignee = ? where number = ?", assignee, number)


@github.writes
def create_comment(app: App, number: int, body: str) -> None:
    """Comment on an issue."""
    _issue(app, number)
    _insert_comment(app, number, app.user, body)


@github.writes
def add_label(app: App, number: int, label: str) -> None:
    """Label an issue."""
    repo = _issue(app, number)["repo"]
    if label not in app.db.column("select name from labels where repo = ?", repo):
        raise ToolError(f"{repo} has no label {shown(label)}; create_label first")
    if app.db.row("select * from issue_labels where number = ? and label = ?", number, label):
        raise ToolError(f"issue {number} already has {label}")
    app.db.insert("issue_labels", number=number, label=label)


@github.writes
def create_label(app: App, repo: str, name: str) -> None:
    """Create a label."""
    check_known("repo", repo, _names(app, "repos"))
    if app.db.row("select * from labels where repo = ? and name = ?", repo, name):
        raise ToolError(f"{repo} already has {shown(name)}; add_label uses it")
    app.db.insert("labels", repo=repo, name=name)


def _insert_comment(app: App, number: int, author: str, body: str) -> None:
    app.db.insert("comments", number=number, author=author, body=body, created_on=app.current_date)


def _issue(app: App, number: int) -> Row:
    issue = app.db.row("select * from issues where number = ?", number)
    if issue is None:
        raise ToolError(f"no issue {number}; list_issues shows the numbers")
    return issue


def _names(app: App, table: Literal["repos", "users"]) -> list[str]:
    return app.db.column(f"select name from {table} order by name")


def _any_issue(app: App, rng: Random, condition: str = "state = 'open'") -> Row:
    return rng.choice(app.db.rows(f"select * from issues where {condition}"))


def _issues(app: App, repo: str, state: State = "open") -> list[Row]:
    sql = "select * from issues where repo = ? and state = ? order by number"
    return app.db.rows(sql, repo, state)


def _shared_load(app: App, rng: Random) -> tuple[str, str, list[int]] | None:
    """A repo, one of its users, and the two or three open issues assigned to that user."""
    issue = _any_issue(app, rng)
    repo, owner = issue["repo"], issue["assignee"]
    numbers = [i["number"] for i in _issues(app, repo) if i["assignee"] == owner]
    return (repo, owner, numbers) if owner and 2 <= len(numbers) <= 3 else None


@github.template(difficulty=1)
def act_on_number(app: App, rng: Random) -> TaskDraft:
    issue, person = _any_issue(app, rng), rng.choice(_names(app, "users"))
    number, remark = issue["number"], rng.choice(vocabulary.REMARKS)
    if rng.random() < 0.4:
        prompts = [f"Comment '{remark}' on issue {number}.", f"Tell issue {number}: '{remark}'."]
        return TaskDraft(
            prompts=prompts, calls=[call("create_comment", number=number, body=remark)]
        )
    if rng.random() < 0.4 or issue["assignee"] == person:
        prompts = [f"Close issue {number}.", f"Issue {number} is solved. Close it."]
        return TaskDraft(
            prompts=prompts, calls=[call("update_issue", number=number, state="closed")]
        )
    prompts = [f"Assign issue {number} to {person}.", f"{person} takes issue {number}. Assign it."]
    return TaskDraft(prompts=prompts, calls=[call("update_issue", number=number, assignee=person)])


@github.template(difficulty=1)
def close_by_title(app: App, rng: Random) -> TaskDraft:
    issue = _any_issue(app, rng)
    title, repo = issue["title"], issue["repo"]
    prompts = [
        f"Close the issue '{title}' in {repo}.",
        f"In {repo}, '{title}' is solved. Close it.",
    ]
    listed = call("list_issues", repo=repo)
    closed = call("update_issue", number=issue["number"], state="closed")
    return TaskDraft(prompts=prompts, calls=[listed, closed])


@github.template(difficulty=1)
def assign_oldest(app: App, rng: Random) -> TaskDraft | None:
    repo, person = rng.choice(_names(app, "repos")), rng.choice(_names(app, "users"))
    issues = _issues(app, repo)
    end, issue = rng.choice([("oldest", issues[0]), ("newest", issues[-1])])
    if issue["assignee"] == person:
        return None
    prompts = [
        f"Assign the {end} open issue of {repo} to {person}.",
        f"{person} takes the {end} open issue in {repo}. Assign it.",
    ]
    listed = call("list_issues", repo=repo)
    assigned = call("update_issue", number=issue["number"], assignee=person)
    return TaskDraft(prompts=prompts, calls=[listed, assigned])


@github.template(difficulty=2)
def label_by_title(app: App, rng: Random) -> TaskDraft | None:
    issue, label = _any_issue(app, rng), rng.choice(vocabulary.LABELS)
    number, title, repo = issue["number"], issue["title"], issue["repo"]
    if app.db.column("select label from issue_labels where number = ?", number):
        return None
    prompts = [
        f"Label the issue '{title}' in {repo} as {label}.",
        f"Put the label {label} on '{title}' in {repo}.",
    ]
    calls = [call("list_issues", repo=repo), call("add_label", number=number, label=label)]
    if label in app.db.column("select name from labels where repo = ?", repo):
        return TaskDraft(prompts=prompts, calls=calls)
    calls += [call("create_label", repo=repo, name=label), calls[-1]]
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@github.template(difficulty=2)
def reopen_with_comment(app: App, rng: Random) -> TaskDraft:
    issue, remark = _any_issue(app, rng, "state = 'closed'"), rng.choice(vocabulary.REMARKS)
    title, repo = issue["title"], issue["repo"]
    prompts = [
        f"Reopen the closed issue '{title}' in {repo} and comment '{remark}'.",
        f"'{title}' in {repo} is back. Reopen it and comment '{remark}'.",
    ]
    calls = [
        call("list_issues", repo=repo, state="closed"),
        call("update_issue", number=issue["number"], state="open"),
        call("create_comment", number=issue["number"], body=remark),
    ]
    return TaskDraft(prompts=prompts, calls=calls)


@github.template(difficulty=2)
def assign_last_commenter(app: App, rng: Random) -> TaskDraft | None:
    issue = _any_issue(app, rng)
    title, repo, number = issue["title"], issue["repo"], issue["number"]
    authors = app.db.column("select author from comments where number = ? order by id", number)
    if not authors or authors[-1] == issue["assignee"]:
        return None
    prompts = [
        f"Assign '{title}' in {repo} to whoever commented last.",
        f"The last to comment on '{title}' in {repo} takes it. Assign it.",
    ]
    calls = [
        call("list_issues", repo=repo),
        call("get_issue", number=number),
        call("update_issue", number=number, assignee=authors[-1]),
    ]
    return TaskDraft(prompts=prompts, calls=calls)


@github.template(difficulty=1)
def count_assigned(app: App, rng: Random) -> TaskDraft:
    repo, person = rng.choice(_names(app, "repos")), rng.choice(_names(app, "users"))
    prompts = [
        f"How many open issues does {person} have in {repo}?",
        f"Count the open issues of {person} in {repo}.",
    ]
    count = sum(issue["assignee"] == person for issue in _issues(app, repo))
    calls = [call("list_issues", repo=repo)]
    return TaskDraft(prompts=prompts, calls=calls, answer=str(count), answer_kind="number")


@github.template(difficulty=3)
def close_all_of(app: App, rng: Random) -> TaskDraft | None:
    if (found := _shared_load(app, rng)) is None:
        return None
    repo, owner, numbers = found
    prompts = [
        f"Close every open issue of {owner} in {repo}.",
        f"{owner} solved all open issues assigned to {owner} in {repo}. Close them.",
    ]
    calls = [call("list_issues", repo=repo)]
    calls += [call("update_issue", number=number, state="closed") for number in numbers]
    return TaskDraft(prompts=prompts, calls=calls)


@github.template(difficulty=2, held_out=True)
def comment_and_close(app: App, rng: Random) -> TaskDraft:
    issue, remark = _any_issue(app, rng), rng.choice(vocabulary.REMARKS)
    title, repo = issue["title"], issue["repo"]
    prompts = [
        f"Comment '{remark}' on the issue '{title}' in {repo}, then close it.",
        f"Close '{title}' in {repo} with the comment '{remark}'.",
    ]
    calls = [
        call("list_issues", repo=repo),
        call("create_comment", number=issue["number"], body=remark),
        call("update_issue", number=issue["number"], state="closed"),
    ]
    return TaskDraft(prompts=prompts, calls=calls)


@github.template(difficulty=3, held_out=True)
def hand_over(app: App, rng: Random) -> TaskDraft | None:
    found, heir = _shared_load(app, rng), rng.choice(_names(app, "users"))
    if found is None or heir == found[1]:
        return None
    repo, owner, numbers = found
    prompts = [
        f"{owner} is away. Assign the open issues of {owner} in {repo} to {heir}.",
        f"Assign every open issue of {owner} in {repo} to {heir}.",
    ]
    calls = [call("list_issues", repo=repo)]
    calls += [call("update_issue", number=number, assignee=heir) for number in numbers]
    return TaskDraft(prompts=prompts, calls=calls)


@github.template(difficulty=2, held_out=True)
def who_has_it(app: App, rng: Random) -> TaskDraft | None:
    issue = _any_issue(app, rng)
    if issue["assignee"] is None:
        return None
    prompts = [
        f"Who is assigned to '{issue['title']}' in {issue['repo']}?",
        f"Whose issue is '{issue['title']}' in {issue['repo']}?",
    ]
    calls = [call("list_issues", repo=issue["repo"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=issue["assignee"], answer_kind="name")
