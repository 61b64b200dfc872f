"""Fira: projects with sprints, stories that follow a workflow, and stories that block others."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Literal

from skyfleet.envs.tools import ToolError, check_known
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

fira = World(
    "fira",
    """
    create table users (name text primary key);
    create table sprints (project text, name text, capacity integer, primary key (project, name));
    create table stories (
        id integer primary key, project text, sprint text, title text, status text,
        points integer, assignee text
    );
    create table links (story_id integer, blocked_by integer, primary key (story_id, blocked_by));
    """,
)

_PROJECTS = ("shop", "game", "radio", "clinic", "museum", "farm")
_TITLES = vocabulary.Names(
    ("build", "draw", "test", "clean", "move", "paint", "check", "write"),
    ("door", "map", "page", "index", "button", "guide", "alarm", "logo"),
)

Sprint = Literal["current", "next", "backlog"]
Status = Literal["todo", "doing", "review", "done"]
WORKFLOW: dict[Status, tuple[Status, ...]] = {
    "todo": ("doing",),
    "doing": ("review", "todo"),
    "review": ("done", "doing"),
    "done": ("doing",),
}


@fira.seeder
def fill(app: App, rng: Random) -> None:
    people = [app.user, *rng.sample([name for name in vocabulary.PEOPLE if name != app.user], 3)]
    for name in people:
        app.db.insert("users", name=name)
    ids = iter(rng.sample(range(1, 25), 24))
    for project in rng.sample(_PROJECTS, 2):
        titles = iter(rng.sample(_TITLES.in_family(app.family), 12))
        plan: dict[Sprint, list[Status]] = {
            "current": rng.sample(["todo", "doing", "review", rng.choice(list(WORKFLOW))], 4),
            "next": ["todo"] * rng.randint(1, 2),
            "backlog": ["todo"] * rng.randint(3, 4),
        }
        for sprint, statuses in plan.items():
            points = rng.sample(range(1, 9), len(statuses))
            for status, size in zip(statuses, points, strict=True):
                story = {"id": next(ids), "title": next(titles), "status": status, "points": size}
                story |= {"project": project, "sprint": sprint, "assignee": rng.choice(people)}
                app.db.insert("stories", **story)
            if sprint != "backlog":
                capacity = sum(points) + rng.randint(2, 10)
                app.db.insert("sprints", project=project, name=sprint, capacity=capacity)
        stories = _stories(app, project, "current")
        reviewed = next(story for story in stories if story["status"] == "review")
        blockers = [one for one in stories if one["status"] != "done" and one != reviewed]
        for story in (reviewed, *rng.sample(_stories(app, project, "backlog"), 2)):
            blocker = rng.choice(blockers)["id"]
            app.db.insert("links", story_id=story["id"], blocked_by=blocker)


@fira.reads
def list_sprints(app: App, project: str) -> list[Row]:
    """List sprints."""
    _check_project(app, project)
    return [
        {"sprint": sprint, "free_points": _free_points(app, project, sprint)}
        for sprint in app.db.column("select name from sprints where project = ?", project)
    ]


@fira.reads
def list_stories(app: App, project: str, sprint: Sprint) -> list[Row]:
    """List stories, smallest first."""
    _check_project(app, project)
    columns = ("title", "id", "status", "points", "assignee")
    return [{name: story[name] for name in columns} for story in _stories(app, project, sprint)]


@fira.reads
def get_story(app: App, story_id: int) -> Row:
    """Show a story."""
    story = _story(app, story_id)
    blockers = " ".join(map(str, _blockers(app, story))) or None
    return {"title": story["title"], "assignee": story["assignee"], "blocked_by": blockers}


@fira.writes
def move_story(app: App, story_id: int, status: Status) -> None:
    """Change the status."""
    story = _story(app, story_id)
    allowed = WORKFLOW[story["status"]]
    if status not in allowed:
        way = " or ".join(allowed)
        raise ToolError(f"story {story_id} is in {story['status']}; it can go to {way}")
    waiting = [one for one in _blockers(app, story) if _story(app, one)["status"] != "done"]
    if status == "done" and waiting:
        raise ToolError(f"story {story_id} is blocked by {waiting[0]}; finish that first")
    app.db.write("update stories set status = ? where id = ?", status, story_id)


@fira.writes
def assign_story(app: App, story_id: int, person: str) -> None:
    """Assign a story."""
    _story(app, story_id)
    check_known("person", person, _people(app))
    app.db.write("update stories set assignee = ? where id = ?", person, story_id)


@fira.writes
def plan_story(app: App, story_id: int, sprint: Sprint) -> None:
    """Plan a story for a sprint."""
    story = _story(app, story_id)
    if story["sprint"] == sprint:
        raise ToolError(f"story {story_id} is in {sprint} already")
    points, free = story["points"], _free_points(app, story["project"], sprint)
    if sprint != "backlog" and points > free:
        raise ToolError(f"{sprint} has {free} points free; story {story_id} has {points}")
    app.db.write("update stories set sprint = ? where id = ?", sprint, story_id)


def _check_project(app: App, project: str) -> None:
    known = app.db.column("select distinct project from sprints order by project")
    check_known("project", project, known)


def _people(app: App) -> list[str]:
    return app.db.column("select name from users order by name")


def _story(app: App, story_id: int) -> Row:
    story = app.db.row("select * from stories where id = ?", story_id)
    if story is None:
        raise ToolError(f"no story {story_id}; list_stories shows the ids")
    return story


def _stories(app: App, project: str, sprint: Sprint) -> list[Row]:
    sql = "select * from stories where project = ? and sprint = ? order by points"
    return app.db.rows(sql, project, sprint)


def _blockers(app: App, story: Row) -> list[int]:
    return app.db.column("select blocked_by from links where story_id = ?", story["id"])


def _free_points(app: App, project: str, sprint: Sprint) -> int:
    """Points that a sprint can still take."""
    sql = "select capacity from sprints where project = ? and name = ?"
    planned = [int(story["points"]) for story in _stories(app, project, sprint)]
    return sum(map(int, app.db.column(sql, project, sprint))) - sum(planned)


def _any_place(app: App, rng: Random, *sprints: Sprint) -> tuple[list[Row], str, RecordedCall]:
    """The stories of a sprint, its description, and the call that lists them."""
    project = rng.choice(app.db.column("select distinct project from sprints"))
    sprint = rng.choice(sprints)
    words = f"the {'backlog' if sprint == 'backlog' else f'{sprint} sprint'} of {project}"
    listed = call("list_stories", project=project, sprint=sprint)
    return _stories(app, project, sprint), words, listed


def _any_backlog(app: App, rng: Random) -> tuple[list[Row], int, str, list[RecordedCall]]:
    """A backlog, the free points of the next sprint, a description, and the calls that list both."""
    stories, place, listed = _any_place(app, rng, "backlog")
    project = stories[0]["project"]
    looks = [call("list_sprints", project=project), listed]
    return stories, _free_points(app, project, "next"), place, looks


def _any_story(app: App, rng: Random, *sprints: Sprint) -> tuple[Row, str, RecordedCall]:
    """A story, a description that is unique to it, and the call that finds it."""
    stories, place, listed = _any_place(app, rng, *sprints)
    story = rng.choice(stories)
    return story, f"'{story['title']}' in {place}", listed


def _moves(story: Row) -> list[RecordedCall]:
    """The calls that move a story from its status to done."""
    path = list(WORKFLOW)
    later = path[path.index(story["status"]) + 1 :]
    return [call("move_story", story_id=story["id"], status=status) for status in later]


@fira.template(difficulty=1)
def one_step(app: App, rng: Random) -> TaskDraft | None:
    story, it, listed = _any_story(app, rng, "current")
    status = rng.choice(WORKFLOW[story["status"]])
    if status == "done" and _blockers(app, story):
        return None
    prompts = [f"Move {it} to {status}.", f"Set {it} to {status}."]
    moved = call("move_story", story_id=story["id"], status=status)
    return TaskDraft(prompts=prompts, calls=[listed, moved])


@fira.template(difficulty=1)
def assign_by_size(app: App, rng: Random) -> TaskDraft | None:
    stories, place, listed = _any_place(app, rng, "current", "backlog")
    end, story = rng.choice([("smallest", stories[0]), ("largest", stories[-1])])
    person = rng.choice(_people(app))
    if story["assignee"] == person:
        return None
    prompts = [
        f"Give the {end} story in {place} to {person}.",
        f"{person} takes the {end} story in {place}. Assign it.",
    ]
    given = call("assign_story", story_id=story["id"], person=person)
    return TaskDraft(prompts=prompts, calls=[listed, given])


@fira.template(difficulty=1)
def points_of(app: App, rng: Random) -> TaskDraft | None:
    (stories, place, listed), person = _any_place(app, rng, "current"), rng.choice(_people(app))
    points = [story["points"] for story in stories if story["assignee"] == person]
    if not 1 <= len(points) <= 2:
        return None
    prompts = [
        f"How many points does {person} have in {place}?",
        f"What is the total of {person}'s points in {place}?",
    ]
    return TaskDraft(prompts=prompts, calls=[listed], answer=str(sum(points)), answer_kind="number")


@fira.template(difficulty=2)
def finish(app: App, rng: Random) -> TaskDraft | None:
    story, it, listed = _any_story(app, rng, "current")
    if story["status"] not in ("todo", "doing") or _blockers(app, story):
        return None
    prompts = [f"Bring {it} to done, step by step.", f"All work on {it} is over. Get it to done."]
    *steps, last = _moves(story)
    return TaskDraft(prompts=prompts, calls=[listed, last, *steps, last], expected_errors=1)


@fira.template(difficulty=2)
def plan_largest_fitting(app: App, rng: Random) -> TaskDraft | None:
    stories, free, place, looks = _any_backlog(app, rng)
    fitting = [story for story in stories if story["points"] <= free]
    if not 1 <= len(fitting) < len(stories):
        return None
    prompts = [
        f"For the next sprint, plan the largest story in {place} that fits.",
        f"Plan the largest story from {place} that the next sprint can take.",
    ]
    planned = call("plan_story", story_id=fitting[-1]["id"], sprint="next")
    return TaskDraft(prompts=prompts, calls=[*looks, planned])


@fira.template(difficulty=2)
def who_blocks(app: App, rng: Random) -> TaskDraft | None:
    story, it, listed = _any_story(app, rng, "current", "backlog")
    if not (blockers := _blockers(app, story)):
        return None
    prompts = [f"Who has the story that blocks {it}?", f"Whose story is {it} waiting for?"]
    calls = [listed, *(call("get_story", story_id=one) for one in (story["id"], blockers[0]))]
    answer = _story(app, blockers[0])["assignee"]
    return TaskDraft(prompts=prompts, calls=calls, answer=answer, answer_kind="name")


@fira.template(difficulty=3)
def finish_blocked(app: App, rng: Random) -> TaskDraft | None:
    story, it, listed = _any_story(app, rng, "current")
    blockers = [_story(app, one) for one in _blockers(app, story)]
    if story["status"] != "review" or not blockers or not _moves(blockers[0]):
        return None
    prompts = [
        f"Bring {it} to done. Whatever blocks it, bring to done first.",
        f"{it} and the story that blocks it are ready. Get both to done.",
    ]
    [last] = _moves(story)
    calls = [listed, last, *_moves(blockers[0]), last]
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@fira.template(difficulty=3)
def fill_sprint(app: App, rng: Random) -> TaskDraft | None:
    stories, free, place, looks = _any_backlog(app, rng)
    sums = accumulate(story["points"] for story in stories)
    fitting = [story for story, total in zip(stories, sums, strict=True) if total <= free]
    if not 2 <= len(fitting) < len(stories):
        return None
    prompts = [
        f"Fill the next sprint from {place}, smallest stories first, while they fit.",
        f"Plan stories from {place}, smallest first, as many as the next sprint can take.",
    ]
    planned = [call("plan_story", story_id=story["id"], sprint="next") for story in fitting]
    return TaskDraft(prompts=prompts, calls=[*looks, *planned])


@fira.template(difficulty=2, held_out=True)
def exact_fit(app: App, rng: Random) -> TaskDraft | None:
    stories, free, place, looks = _any_backlog(app, rng)
    title = next((story["title"] for story in stories if story["points"] == free), None)
    if title is None:
        return None
    prompts = [
        f"Which story in {place} would fill the next sprint exactly?",
        f"Name the story in {place} with just the points that the next sprint has free.",
    ]
    return TaskDraft(prompts=prompts, calls=looks, answer=title, answer_kind="title")


@fira.template(difficulty=3, held_out=True)
def assign_with_blocker(app: App, rng: Random) -> TaskDraft | None:
    story, it, listed = _any_story(app, rng, "current", "backlog")
    blockers = [_story(app, one) for one in _blockers(app, story)]
    if not blockers or blockers[0]["assignee"] == story["assignee"]:
        return None
    prompts = [
        f"Give {it} to whoever has the story that blocks it.",
        f"{it} is blocked by another story. Give both to the person who has that one.",
    ]
    calls = [listed, *(call("get_story", story_id=one["id"]) for one in (story, blockers[0]))]
    calls.append(call("assign_story", story_id=story["id"], person=blockers[0]["assignee"]))
    return TaskDraft(prompts=prompts, calls=calls)
