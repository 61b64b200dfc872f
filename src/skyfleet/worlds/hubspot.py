"""Hubspot: companies, their contacts, deals in stages, notes and follow-ups."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Literal, get_args

from skyfleet.envs.tools import ToolError, check_known
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

hubspot = World(
    "hubspot",
    """
    create table team (name text primary key);
    create table companies (name text primary key);
    create table contacts (id integer primary key, company text, role text, name text);
    create table deals (
        id integer primary key, company text, stage text, amount_k integer, owner text,
        contact_id integer
    );
    create table notes (
        id integer primary key, deal_id integer, author text, body text, written_on text
    );
    create table follow_ups (person text, day text, deal_id integer, primary key (person, day));
    """,
)

_COMPANIES = vocabulary.Names(
    ("Blue", "Green", "Silver", "Golden", "Red", "Black", "White", "Amber"),
    ("Foods", "Tools", "Bank", "Books", "Cars", "Media", "Farms", "Energy"),
)
_CLIENTS = ("ivan", "jane", "kate", "leo", "maria", "nick", "olga", "paul")
_ROLES = ("boss", "buyer", "lawyer")

Stage = Literal["lead", "talk", "offer", "won"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@hubspot.seeder
def fill(app: App, rng: Random) -> None:
    team = [app.user, *rng.sample([name for name in vocabulary.PEOPLE if name != app.user], 3)]
    for name in team:
        app.db.insert("team", name=name)
    amounts = iter(rng.sample(range(10, 100), 16))
    companies = rng.sample(_COMPANIES.in_family(app.family), 8)
    contact_ids, deal_ids = iter(rng.sample(range(1, 25), 24)), iter(rng.sample(range(1, 17), 16))
    for company in companies:
        app.db.insert("companies", name=company)
        for role, name in zip(_ROLES, rng.sample(_CLIENTS, 3), strict=True):
            app.db.insert("contacts", id=next(contact_ids), company=company, role=role, name=name)
    for stage, place in zip(STAGES, (0, 1, 0, 1), strict=True):
        # Two stages apart, so that a deal that moves on never reaches another of its company.
        for company in rng.sample(companies[place::2], rng.randint(3, 4)):
            contact = rng.choice([one["id"] for one in list_contacts(app, company)])
            deal = {"company": company, "stage": stage, "amount_k": next(amounts)}
            deal |= {"owner": rng.choice(team), "contact_id": contact}
            if stage == "lead" and rng.random() < 0.5:
                deal["contact_id"] = None
            deal_id = app.db.insert("deals", id=next(deal_ids), **deal)
            if stage == "won" or rng.random() < 0.5:
                _insert_note(app, deal_id, rng.choice(team), rng.choice(vocabulary.REMARKS))
    open_deals = app.db.column("select id from deals where stage != 'won'")
    for person in team:
        for day in rng.sample(vocabulary.DAYS, rng.randint(2, 3)):
            app.db.insert("follow_ups", person=person, day=day, deal_id=rng.choice(open_deals))


@hubspot.reads
def list_deals(app: App, stage: Stage) -> list[Row]:
    """List deals of a stage, largest first."""
    columns = ("company", "id", "amount_k", "owner")
    return [{name: deal[name] for name in columns} for deal in _deals(app, stage)]


@hubspot.reads
def get_deal(app: App, deal_id: int) -> Row:
    """Show a deal."""
    _deal(app, deal_id)
    return app.db.rows(
        "select company, stage,"
        " (select name from contacts c where c.id = contact_id) as contact,"
        " (select author || ': ' || body from notes n where n.deal_id = d.id"
        " order by id desc limit 1) as last_note from deals d where id = ?",
        deal_id,
    )[0]


@hubspot.writes
def update_deal(
    app: App,
    deal_id: int,
    stage: Stage | None = None,
    owner: str | None = None,
    contact_id: int | None = None,
) -> None:
    """Change stage, owner or contact."""
    company = _deal(app, deal_id)["company"]
    if stage is None and owner is None and contact_id is None:
        raise ToolError("nothing to change; give stage, owner or contact_id")
    if owner is not None:
        check_known("owner", owner, _team(app))
        app.db.write("update deals set owner = ? where id = ?", owner, deal_id)
    if contact_id is not None:
        if contact_id not in [contact["id"] for contact in list_contacts(app, company)]:
            raise ToolError(f"no contact {contact_id} at {company}; list_contacts shows the ids")
        app.db.write("update deals set contact_id = ? where id = ?", contact_id, deal_id)
    if stage is not None:
        _check_move(app, _deal(app, deal_id), stage)
        app.db.write("update deals set stage = ? where id = ?", stage, deal_id)


@hubspot.reads
def list_contacts(app: App, company: str) -> list[Row]:
    """List people of a company."""
    check_known("company", company, app.db.column("select name from companies order by name"))
    return app.db.rows("select role, id, name from contacts where company = ? order by id", company)


@hubspot.writes
def add_note(app: App, deal_id: int, body: str) -> None:
    """Add a note to a deal."""
    _deal(app, deal_id)
    _insert_note(app, deal_id, app.user, body)


@hubspot.reads
def list_follow_ups(app: App) -> list[Row]:
    """List your follow-ups."""
    return app.db.rows(
        "select day, deal_id, company from follow_ups join deals on deals.id = deal_id"
        " where person = ? order by deal_id",
        app.user,
    )


@hubspot.writes
def plan_follow_up(app: App, deal_id: int, day: vocabulary.Day) -> None:
    """Plan a follow-up, one a day."""
    _deal(app, deal_id)
    free = _free_days(app)
    if day not in free:
        raise ToolError(f"{day} is taken; your free days: {', '.join(free) or 'none'}")
    app.db.insert("follow_ups", person=app.user, day=day, deal_id=deal_id)


def _insert_note(app: App, deal_id: int, author: str, body: str) -> None:
    note = {"deal_id": deal_id, "author": author, "body": body}
    app.db.insert("notes", **note, written_on=app.current_date)


def _check_move(app: App, deal: Row, stage: Stage) -> None:
    """A deal moves one stage at a time; a talk needs a contact, a won deal needs a note."""
    following = dict(pairwise(STAGES)).get(deal["stage"], "none")
    if stage != following:
        raise ToolError(f"deal {deal['id']} is in {deal['stage']}; next stage: {following}")
    if stage == "talk" and deal["contact_id"] is None:
        raise ToolError(f"deal {deal['id']} has no contact; give it one of {deal['company']}")
    if stage == "won" and not _notes(app, deal):
        raise ToolError(f"deal {deal['id']} has no note; add_note first")


def _deal(app: App, deal_id: int) -> Row:
    deal = app.db.row("select * from deals where id = ?", deal_id)
    if deal is None:
        raise ToolError(f"no deal {deal_id}; list_deals shows the ids")
    return deal


def _deals(app: App, stage: Stage) -> list[Row]:
    return app.db.rows("select * from deals where stage = ? order by amount_k desc", stage)


def _team(app: App) -> list[str]:
    return app.db.column("select name from team order by name")


def _notes(app: App, deal: Row) -> list[Row]:
    return app.db.rows("select * from notes where deal_id = ? order by id", deal["id"])


def _free_days(app: App) -> list[vocabulary.Day]:
    taken = app.db.column("select day from follow_ups where person = ?", app.user)
    return [day for day in vocabulary.DAYS if day not in taken]


def _find(deal: Row) -> RecordedCall:
    return call("list_deals", stage=deal["stage"])


def _any_deal(app: App, rng: Random, *stages: Stage) -> tuple[Row, str]:
    """A deal, and a description that is unique to it."""
    deal = rng.choice(_deals(app, rng.choice(stages)))
    return deal, f"the {deal['company']} deal in {deal['stage']}"


def _edge_deal(app: App, rng: Random) -> tuple[Row, str]:
    """The largest or smallest deal of a stage, and its description."""
    deals = _deals(app, rng.choice(STAGES))
    end, deal = rng.choice([("largest", deals[0]), ("smallest", deals[-1])])
    return deal, f"the {end} deal in {deal['stage']}"


@hubspot.template(difficulty=1)
def hand_over(app: App, rng: Random) -> TaskDraft | None:
    (deal, it), person = _edge_deal(app, rng), rng.choice(_team(app))
    if deal["owner"] == person:
        return None
    prompts = [f"Give {it} to {person}.", f"{person} is to be the owner of {it}."]
    given = call("update_deal", deal_id=deal["id"], owner=person)
    return TaskDraft(prompts=prompts, calls=[_find(deal), given])


@hubspot.template(difficulty=1)
def note_follow_up(app: App, rng: Random) -> TaskDraft:
    planned, remark = rng.choice(list_follow_ups(app)), rng.choice(vocabulary.REMARKS)
    prompts = [
        f"Note '{remark}' on the deal that I follow up on {planned['day']}.",
        f"My {planned['day']} follow-up: note '{remark}' on its deal.",
    ]
    noted = call("add_note", deal_id=planned["deal_id"], body=remark)
    return TaskDraft(prompts=prompts, calls=[call("list_follow_ups"), noted])


@hubspot.template(difficulty=1)
def worth_of_deals(app: App, rng: Random) -> TaskDraft | None:
    deals, owner = _deals(app, rng.choice(STAGES)), rng.choice(_team(app))
    amounts = [deal["amount_k"] for deal in deals if deal["owner"] == owner]
    if not 1 <= len(amounts) <= 2:
        return None
    theirs = f"deals of {owner} in {deals[0]['stage']}"
    prompts = [
        f"How many thousand are the {theirs} worth?",
        f"What is the total of the {theirs}, in thousands?",
    ]
    calls = [_find(deals[0])]
    return TaskDraft(prompts=prompts, calls=calls, answer=str(sum(amounts)), answer_kind="number")


@hubspot.template(difficulty=2)
def who_at_company(app: App, rng: Random) -> TaskDraft:
    deal, it = _edge_deal(app, rng)
    person = rng.choice(list_contacts(app, deal["company"]))
    prompts = [
        f"Who is the {person['role']} of the company with {it}?",
        f"For {it}, name the {person['role']} of the company.",
    ]
    calls = [_find(deal), call("list_contacts", company=deal["company"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=person["name"], answer_kind="name")


@hubspot.template(difficulty=2)
def hand_to_author(app: App, rng: Random) -> TaskDraft | None:
    deal, it = _any_deal(app, rng, *STAGES)
    authors = [note["author"] for note in _notes(app, deal)]
    if not authors or authors[-1] == deal["owner"]:
        return None
    prompts = [
        f"Give {it} to whoever wrote its last note.",
        f"Whoever wrote the last note on {it} becomes its owner.",
    ]
    read = call("get_deal", deal_id=deal["id"])
    given = call("update_deal", deal_id=deal["id"], owner=authors[-1])
    return TaskDraft(prompts=prompts, calls=[_find(deal), read, given])


@hubspot.template(difficulty=2)
def win_deal(app: App, rng: Random) -> TaskDraft:
    (deal, it), remark = _any_deal(app, rng, "offer"), rng.choice(vocabulary.REMARKS)
    prompts = [
        f"Move {it} to won. If it needs a note, write '{remark}'.",
        f"We won {it}. Move it; should it lack a note, note '{remark}'.",
    ]
    won = call("update_deal", deal_id=deal["id"], stage="won")
    if _notes(app, deal):
        return TaskDraft(prompts=prompts, calls=[_find(deal), won])
    noted = call("add_note", deal_id=deal["id"], body=remark)
    return TaskDraft(prompts=prompts, calls=[_find(deal), won, noted, won], expected_errors=1)


@hubspot.template(difficulty=2)
def follow_up_or_first_free(app: App, rng: Random) -> TaskDraft:
    (deal, it), day = _any_deal(app, rng, *STAGES[:3]), rng.choice(vocabulary.DAYS)
    free = _free_days(app)
    prompts = [
        f"Plan a follow-up of {it} on {day}. If taken, my first free day.",
        f"Follow up {it} on {day}, or else on my first free day.",
    ]
    days = [day] if day in free else [day, free[0]]
    planned = [call("plan_follow_up", deal_id=deal["id"], day=one) for one in days]
    return TaskDraft(prompts=prompts, calls=[_find(deal), *planned], expected_errors=len(days) - 1)


@hubspot.template(difficulty=3)
def start_talk(app: App, rng: Random) -> TaskDraft:
    deal, it = _any_deal(app, rng, "lead")
    person = rng.choice(list_contacts(app, deal["company"]))
    prompts = [
        f"Move {it} to talk. If it needs a contact, take the {person['role']}.",
        f"Bring {it} to talk. The {person['role']} is its contact if it has none.",
    ]
    moved = call("update_deal", deal_id=deal["id"], stage="talk")
    if deal["contact_id"] is not None:
        return TaskDraft(prompts=prompts, calls=[_find(deal), moved])
    asked = call("list_contacts", company=deal["company"])
    chosen = call("update_deal", deal_id=deal["id"], contact_id=person["id"])
    calls = [_find(deal), moved, asked, chosen, moved]
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@hubspot.template(difficulty=2, held_out=True)
def contact_of_follow_up(app: App, rng: Random) -> TaskDraft | None:
    planned = rng.choice(list_follow_ups(app))
    contact = get_deal(app, planned["deal_id"])["contact"]
    if contact is None:
        return None
    prompts = [
        f"Who is the contact of the deal that I follow up on {planned['day']}?",
        f"Name the contact for my {planned['day']} follow-up.",
    ]
    calls = [call("list_follow_ups"), call("get_deal", deal_id=planned["deal_id"])]
    return TaskDraft(prompts=prompts, calls=calls, answer=contact, answer_kind="name")


@hubspot.template(difficulty=3, held_out=True)
def two_stages_on(app: App, rng: Random) -> TaskDraft | None:
    (deal, it), day = _any_deal(app, rng, "lead"), rng.choice(_free_days(app))
    if deal["contact_id"] is None:
        return None
    prompts = [
        f"Bring {it} to offer and plan a follow-up on {day}.",
        f"Move {it} on to offer. I follow it up on {day}.",
    ]
    calls = [call("update_deal", deal_id=deal["id"], stage=stage) for stage in ("talk", "offer")]
    calls.append(call("plan_follow_up", deal_id=deal["id"], day=day))
    return TaskDraft(prompts=prompts, calls=[_find(deal), *calls])
