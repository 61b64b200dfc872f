"""Reddit: subreddits and their members, posts, votes and replies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from skyfleet.envs.tools import ToolError, check_known, shown
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

reddit = World(
    "reddit",
    """
    create table subreddits (name text primary key, moderator text);
    create table memberships (subreddit text, user text, primary key (subreddit, user));
    create table posts (
        id integer primary key, subreddit text, author text, title text, score integer,
        status text, crosspost_of integer, posted_on text
    );
    create table comments (id integer primary key, post_id integer, author text, body text);
    create table votes (post_id integer, user text, direction text, primary key (post_id, user));
    """,
)

_SUBREDDITS = ("cooking", "music", "hiking", "chess", "movies", "travel")
_TITLES = vocabulary.Names(
    ("cheap", "green", "weird", "broken", "small", "lost", "heavy", "empty"),
    ("bike", "camera", "recipe", "puzzle", "song", "tent", "lamp", "book"),
)


@reddit.seeder
def fill(app: App, rng: Random) -> None:
    others = [name for name in vocabulary.PEOPLE if name != app.user]
    subreddits = rng.sample(_SUBREDDITS, 3)
    ids = iter(rng.sample(range(1, 13), 12))
    # Sizes differ by two and scores by three: no single join, vote or post makes a tie.
    for place, (subreddit, size) in enumerate(
        zip(subreddits, rng.sample([2, 4, 6], 3), strict=True)
    ):
        members = rng.sample(others, size)
        if place < 2:
            members[place] = (
                app.user
            )  # Moderates the first, is a member of the second, not of the third.
        app.db.insert("subreddits", name=subreddit, moderator=members[0])
        for name in members:
            app.db.insert("memberships", subreddit=subreddit, user=name)
        authors = rng.sample(others, 3)
        scores = rng.sample(range(-12, 24, 3), rng.randint(3, 4))
        titles = rng.sample(_TITLES.in_family(app.family), len(scores))
        for title, score in zip(titles, scores, strict=True):
            post = {"id": next(ids), "subreddit": subreddit, "author": rng.choice(authors)}
            _insert_post(app, **post, title=title, score=score)
            for author in rng.sample(authors, rng.randint(0, 3)):
                body = rng.choice(vocabulary.REMARKS)
                app.db.insert("comments", post_id=post["id"], author=author, body=body)


@reddit.reads
def list_subreddits(app: App) -> list[Row]:
    """List subreddits."""
    return app.db.rows(
        "select name, moderator, count(*) as members from subreddits"
        " join memberships on subreddit = name group by name"
    )


@reddit.reads
def list_posts(app: App, subreddit: str) -> list[Row]:
    """List posts, newest first."""
    _members(app, subreddit)
    return app.db.rows(
        "select title, id, author, score from posts"
        " where subreddit = ? and status != 'removed' order by id desc",
        subreddit,
    )


@reddit.reads
def list_replies(app: App, post_id: int) -> list[Row]:
    """List replies, oldest first."""
    _post(app, post_id)
    return app.db.rows("select author, body from comments where post_id = ? order by id", post_id)


@reddit.writes
def create_post(app: App, subreddit: str, title: str, crosspost_of: int | None = None) -> Row:
    """Post or crosspost."""
    _check_member(app, subreddit)
    if crosspost_of is not None and (old := _post(app, crosspost_of)["title"]) != title:
        raise ToolError(f"title is {shown(title)}; a crosspost keeps its title, {shown(old)}")
    post = {"subreddit": subreddit, "author": app.user, "title": title, "score": 1}
    return {"id": _insert_post(app, **post, crosspost_of=crosspost_of)}


@reddit.writes
def create_reply(app: App, post_id: int, body: str) -> None:
    """Reply to a post."""
    post = _post(app, post_id)
    _check_member(app, post["subreddit"])
    if post["status"] == "locked":
        raise ToolError(f"post {post_id} is locked; reply to another")
    app.db.insert("comments", post_id=post_id, author=app.user, body=body)


@reddit.writes
def vote_post(app: App, post_id: int, direction: Literal["up", "down"]) -> None:
    """Vote on a post."""
    _post(app, post_id)
    if app.db.row("select * from votes where post_id = ? and user = ?", post_id, app.user):
        raise ToolError(f"you have voted on post {post_id}; vote on another")
    app.db.insert("votes", post_id=post_id, user=app.user, direction=direction)
    step = 1 if direction == "up" else -1
    app.db.write("update posts set score = score + ? where id = ?", step, post_id)


@reddit.writes
def join_subreddit(app: App, name: str) -> None:
    """Become a member."""
    if app.user in _members(app, name):
        raise ToolError(f"you are in {name} already; write there")
    app.db.insert("memberships", subreddit=name, user=app.user)


@reddit.writes
def moderate_post(app: App, post_id: int, status: Literal["locked", "removed"]) -> None:
    """Lock or remove a post."""
    subreddit = _post(app, post_id)["subreddit"]
    moderator = app.db.column("select moderator from subreddits where name = ?", subreddit)[0]
    if moderator != app.user:
        raise ToolError(f"{moderator} moderates {subreddit}; choose a post where you do")
    app.db.write("update posts set status = ? where id = ?", status, post_id)


def _insert_post(app: App, **post: object) -> int:
    return app.db.insert("posts", **post, status="open", posted_on=app.current_date)


def _post(app: App, post_id: int) -> Row:
    post = app.db.row("select * from posts where id = ? and status != 'removed'", post_id)
    if post is None:
        raise ToolError(f"no post {post_id}; list_posts shows the ids")
    return post


def _members(app: App, subreddit: str) -> list[str]:
    check_known("subreddit", subreddit, _subreddits(app))
    return app.db.column("select user from memberships where subreddit = ?", subreddit)


def _check_member(app: App, subreddit: str) -> None:
    if app.user not in _members(app, subreddit):
        raise ToolError(f"only members write in {subreddit}; join_subreddit first")


def _subreddits(app: App) -> list[str]:
    return app.db.column("select name from subreddits order by name")


def _own_subreddit(app: App) -> str:
    sql = "select name from subreddits where moderator = ?"
    return str(app.db.column(sql, app.user)[0])


def _any_post(app: App, rng: Random) -> Row:
    """A post that the user may still vote on and, as a member, reply to."""
    posts = app.db.rows("select * from posts where status = 'open' order by id")
    return rng.choice([post for post in posts if post["id"] not in _voted(app)])


def _voted(app: App) -> list[int]:
    return app.db.column("select post_id from votes where user = ?", app.user)


def _pick_superlative(app: App, rng: Random, subreddit: str) -> tuple[str, Row]:
    """A superlative that one post of the subreddit has, and the post."""
    posts = list_posts(app, subreddit)
    if rng.random() < 0.3:
        return rng.choice([("newest", posts[0]), ("oldest", posts[-1])])
    ranked = sorted(posts, key=lambda post: int(post["score"]))
    return rng.choice([("best scored", ranked[-1]), ("worst scored", ranked[0])])


def _list_posts(subreddit: str) -> RecordedCall:
    return call("list_posts", subreddit=subreddit)


def _draft_writing(
    app: App, subreddit: str, prompts: Sequence[str], *calls: RecordedCall
) -> TaskDraft:
    """The last call writes in the subreddit; for non-members it fails first, and they join."""
    if app.user in _members(app, subreddit):
        return TaskDraft(prompts=prompts, calls=calls)
    calls = (*calls, call("join_subreddit", name=subreddit), calls[-1])
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@reddit.template(difficulty=1)
def vote_on_post(app: App, rng: Random) -> TaskDraft:
    post, direction = _any_post(app, rng), rng.choice(["up", "down"])
    title, subreddit, number = post["title"], post["subreddit"], post["id"]
    voted = call("vote_post", post_id=number, direction=direction)
    if rng.random() < 0.3:
        prompts = [f"Vote {direction} on post {number}.", f"Give post {number} a vote {direction}."]
        return TaskDraft(prompts=prompts, calls=[voted])
    prompts = [
        f"Vote {direction} on '{title}' in {subreddit}.",
        f"Give the post '{title}' in {subreddit} a vote {direction}.",
    ]
    return TaskDraft(prompts=prompts, calls=[_list_posts(subreddit), voted])


@reddit.template(difficulty=1)
def lock_one(app: App, rng: Random) -> TaskDraft:
    subreddit = _own_subreddit(app)
    end, post = _pick_superlative(app, rng, subreddit)
    prompts = [f"Lock the {end} post in {subreddit}.", f"In {subreddit}, lock the {end} post."]
    locked = call("moderate_post", post_id=post["id"], status="locked")
    return TaskDraft(prompts=prompts, calls=[_list_posts(subreddit), locked])


@reddit.template(difficulty=1)
def author_of_one(app: App, rng: Random) -> TaskDraft:
    subreddit = rng.choice(_subreddits(app))
    end, post = _pick_superlative(app, rng, subreddit)
    prompts = [f"Who wrote the {end} post in {subreddit}?", f"Whose post in {subreddit} is {end}?"]
    calls = [_list_posts(subreddit)]
    return TaskDraft(prompts=prompts, calls=calls, answer=post["author"], answer_kind="name")


@reddit.template(difficulty=2)
def reply_by_title(app: App, rng: Random) -> TaskDraft:
    post, remark = _any_post(app, rng), rng.choice(vocabulary.REMARKS)
    subreddit, title = post["subreddit"], post["title"]
    prompts = [
        f"Reply '{remark}' to '{title}' in {subreddit}.",
        f"Write '{remark}' under the post '{title}' of {subreddit}.",
    ]
    replied = call("create_reply", post_id=post["id"], body=remark)
    return _draft_writing(app, subreddit, prompts, _list_posts(subreddit), replied)


@reddit.template(difficulty=2)
def crosspost(app: App, rng: Random) -> TaskDraft | None:
    post, target = _any_post(app, rng), rng.choice(_subreddits(app))
    subreddit, title = post["subreddit"], post["title"]
    if title in [other["title"] for other in list_posts(app, target)]:
        return None
    prompts = [
        f"Crosspost '{title}' from {subreddit} to {target}.",
        f"{target} should see '{title}' of {subreddit}. Crosspost it there.",
    ]
    posted = call("create_post", subreddit=target, title=title, crosspost_of=post["id"])
    return _draft_writing(app, target, prompts, _list_posts(subreddit), posted)


@reddit.template(difficulty=3)
def clean_up(app: App, rng: Random) -> TaskDraft | None:
    subreddit, floor = _own_subreddit(app), rng.choice([0, 5])
    posts = list_posts(app, subreddit)
    bad = [post["id"] for post in posts if post["score"] < floor]
    if not 2 <= len(bad) < len(posts):
        return None
    prompts = [
        f"Remove every post with a score below {floor} in the subreddit that I moderate.",
        f"Which subreddit do I moderate? Remove its posts that score less than {floor}.",
    ]
    calls = [call("list_subreddits"), _list_posts(subreddit)]
    calls += [call("moderate_post", post_id=number, status="removed") for number in bad]
    return TaskDraft(prompts=prompts, calls=calls)


@reddit.template(difficulty=3)
def vote_for_replier(app: App, rng: Random) -> TaskDraft | None:
    where, there = rng.sample(_subreddits(app), 2)
    post = rng.choice(list_posts(app, where))
    last = [reply["author"] for reply in list_replies(app, post["id"])][-1:]
    theirs = [other["id"] for other in list_posts(app, there) if [other["author"]] == last]
    if len(theirs) != 1 or theirs[0] in _voted(app):
        return None
    prompts = [
        f"Who replied last to '{post['title']}' in {where}? Vote up on their post in {there}.",
        f"Vote up on the post in {there} by the last to reply to '{post['title']}' in {where}.",
    ]
    looked_up = [_list_posts(where), call("list_replies", post_id=post["id"]), _list_posts(there)]
    voted = call("vote_post", post_id=theirs[0], direction="up")
    return TaskDraft(prompts=prompts, calls=[*looked_up, voted])


@reddit.template(difficulty=2, held_out=True)
def total_score(app: App, rng: Random) -> TaskDraft | None:
    pair = rng.sample(_subreddits(app), 2)
    found = [(post["author"], post["score"]) for name in pair for post in list_posts(app, name)]
    author = rng.choice(found)[0]
    scores = [score for other, score in found if other == author]
    if len(scores) < 2:
        return None
    prompts = [
        f"What is the total score of all posts by {author} in {pair[0]} and {pair[1]}?",
        f"How much do the posts of {author} in {pair[0]} and {pair[1]} score together?",
    ]
    calls = [_list_posts(name) for name in pair]
    return TaskDraft(prompts=prompts, calls=calls, answer=str(sum(scores)), answer_kind="number")


@reddit.template(difficulty=3, held_out=True)
def crosspost_to_biggest(app: App, rng: Random) -> TaskDraft | None:
    subreddit = rng.choice(_subreddits(app))
    biggest = max(list_subreddits(app), key=lambda row: int(row["members"]))["name"]
    end, post = _pick_superlative(app, rng, subreddit)
    if subreddit == biggest:
        return None
    prompts = [
        f"Crosspost the {end} post of {subreddit} to the subreddit with the most members.",
        f"Where are most members? Crosspost the {end} post of {subreddit} there.",
    ]
    posted = call("create_post", subreddit=biggest, title=post["title"], crosspost_of=post["id"])
    looked_up = [_list_posts(subreddit), call("list_subreddits")]
    return _draft_writing(app, biggest, prompts, *looked_up, posted)
