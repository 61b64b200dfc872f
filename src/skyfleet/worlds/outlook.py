"""Outlook: mail folders, contacts and a calendar."""

from __future__ import annotations

from random import Random
from typing import Annotated

from pydantic import Field

from skyfleet.envs.tools import ToolError, check_known
from skyfleet.worlds import vocabulary
from skyfleet.worlds.database import Row
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import TaskDraft, World, call

outlook = World(
    "outlook",
    """
    create table folders (name text primary key);
    create table contacts (name text primary key);
    create table messages (
        id integer primary key, folder text, sender text, subject text, body text
    );
    create table sent_messages (
        id integer primary key, recipient text, body text, sent_on text
    );
    create table events (id integer primary key, title text, day text, hour integer);
    """,
)

HOURS = range(9, 18)
Hour = Annotated[int, Field(ge=HOURS[0], le=HOURS[-1])]


@outlook.seeder
def fill(app: App, rng: Random) -> None:
    people = rng.sample([name for name in vocabulary.PEOPLE if name != app.user], 5)
    for name in people:
        app.db.insert("contacts", name=name)
    subjects = iter(rng.sample(vocabulary.SUBJECTS.in_family(app.family), 17))
    ids = iter(rng.sample(range(1, 18), 17))
    for folder, size in [("Inbox", 5), *((name, rng.randint(2, 3)) for name in vocabulary.FOLDERS)]:
        app.db.insert("folders", name=folder)
        senders = rng.sample(people, 3)
        for _ in range(size):
            sender = rng.choice(senders)
            body = rng.choice(
                [
                    f"can we meet on {rng.choice(vocabulary.DAYS)} at {rng.choice(HOURS)}",
                    f"the door code is {rng.randint(10, 99)}",
                    f"please ask {rng.choice([name for name in people if name != sender])}",
                ]
            )
            mail = {"id": next(ids), "folder": folder, "sender": sender, "body": body}
            app.db.insert("messages", **mail, subject=next(subjects))
    for day in vocabulary.DAYS:
        hours = sorted(rng.sample(HOURS, rng.randint(2, 4)))
        for hour, title in zip(hours, rng.sample(vocabulary.EVENTS, len(hours)), strict=True):
            app.db.insert("events", title=title, day=day, hour=hour)


@outlook.reads
def list_messages(app: App, folder: str = "Inbox") -> list[Row]:
    """List mail, oldest first."""
    check_known("folder", folder, app.db.column("select name from folders order by name"))
    sql = "select subject, id, sender from messages where folder = ? order by id"
    return app.db.rows(sql, folder)


@outlook.reads
def get_message(app: App, message_id: int) -> Row:
    """Show a mail."""
    message = app.db.row("select * from messages where id = ?", message_id)
    if message is None:
        raise ToolError(f"no message {message_id}; list_messages shows the ids")
    return message


@outlook.writes
def update_message(app: App, message_id: int, folder: str) -> None:
    """Move a mail."""
    get_message(app, message_id)
    check_known("folder", folder, app.db.column("select name from folders order by name"))
    app.db.write("update messages set folder = ? where id = ?", folder, message_id)


@outlook.writes
def create_message(app: App, to: str, body: str) -> None:
    """Send a mail."""
    check_known("contact", to, app.db.column("select name from contacts order by name"))
    app.db.insert("sent_messages", recipient=to, body=body, sent_on=app.current_date)


@outlook.reads
def list_events(app: App, day: vocabulary.Day) -> list[Row]:
    """List events, first to last."""
    return app.db.rows("select title, hour, id from events where day = ? order by hour", day)


@outlook.writes
def create_event(app: App, title: str, day: vocabulary.Day, hour: Hour) -> Row:
    """Plan an event."""
    free = _free_hours(app, day)
    if hour not in free:
        later = next((str(other) for other in free if other > hour), "none")
        raise ToolError(f"{day} at {hour} is taken; next free hour: {later}")
    return {"id": app.db.insert("events", title=title, day=day, hour=hour)}


def _free_hours(app: App, day: str) -> list[int]:
    taken = app.db.column("select hour from events where day = ?", day)
    return [hour for hour in HOURS if hour not in taken]


def _mail(app: App, rng: Random, condition: str = "folder = 'Inbox'") -> Row:
    return rng.choice(app.db.rows(f"select * from messages where {condition}"))


def _inbox_mail(app: App, rng: Random, about: str) -> Row | None:
    """A mail in the inbox whose body contains `about`."""
    mail = _mail(app, rng)
    return mail if about in mail["body"] else None


@outlook.template(difficulty=1)
def file_by_id(app: App, rng: Random) -> TaskDraft:
    mail, folder = _mail(app, rng), rng.choice(vocabulary.FOLDERS)
    prompts = [f"Move message {mail['id']} to {folder}.", f"File message {mail['id']} in {folder}."]
    moved = call("update_message", message_id=mail["id"], folder=folder)
    return TaskDraft(prompts=prompts, calls=[moved])


@outlook.template(difficulty=1)
def file_by_subject(app: App, rng: Random) -> TaskDraft:
    mail, folder = _mail(app, rng), rng.choice(vocabulary.FOLDERS)
    prompts = [
        f"Move the mail '{mail['subject']}' from Inbox to {folder}.",
        f"File '{mail['subject']}' in my Inbox under {folder}.",
        f"'{mail['subject']}' in my Inbox belongs in {folder}. Move it.",
    ]
    listed = call("list_messages", folder="Inbox")
    moved = call("update_message", message_id=mail["id"], folder=folder)
    return TaskDraft(prompts=prompts, calls=[listed, moved])


@outlook.template(difficulty=1)
def answer_sender(app: App, rng: Random) -> TaskDraft:
    mail, remark = _mail(app, rng, "1"), rng.choice(vocabulary.REMARKS)
    prompts = [
        f"Send '{remark}' to whoever sent '{mail['subject']}' in {mail['folder']}.",
        f"Tell the sender of '{mail['subject']}' in {mail['folder']}: '{remark}'.",
    ]
    listed = call("list_messages", folder=mail["folder"])
    sent = call("create_message", to=mail["sender"], body=remark)
    return TaskDraft(prompts=prompts, calls=[listed, sent])


@outlook.template(difficulty=2)
def ask_person_named(app: App, rng: Random) -> TaskDraft | None:
    mail, remark = _inbox_mail(app, rng, "ask"), rng.choice(vocabulary.REMARKS)
    if mail is None:
        return None
    prompts = [
        f"'{mail['subject']}' in my Inbox says whom to ask. Send them '{remark}'.",
        f"Send '{remark}' to the person that '{mail['subject']}' in my Inbox names.",
    ]
    calls = [
        call("list_messages", folder="Inbox"),
        call("get_message", message_id=mail["id"]),
        call("create_message", to=mail["body"].split()[-1], body=remark),
    ]
    return TaskDraft(prompts=prompts, calls=calls)


@outlook.template(difficulty=3)
def meeting_from_mail(app: App, rng: Random) -> TaskDraft | None:
    mail, title = _inbox_mail(app, rng, "meet"), rng.choice(vocabulary.EVENTS)
    if mail is None:
        return None
    *_, day, _, hour = mail["body"].split()
    if int(hour) not in _free_hours(app, day):
        return None
    prompts = [
        f"Plan '{title}' at the time that '{mail['subject']}' in my Inbox asks for.",
        f"'{mail['subject']}' in my Inbox asks to meet. Plan it as '{title}'.",
    ]
    calls = [
        call("list_messages", folder="Inbox"),
        call("get_message", message_id=mail["id"]),
        call("create_event", title=title, day=day, hour=int(hour)),
    ]
    return TaskDraft(prompts=prompts, calls=calls)


@outlook.template(difficulty=2)
def plan_or_later(app: App, rng: Random) -> TaskDraft | None:
    title, day, hour = rng.choice(vocabulary.EVENTS), rng.choice(vocabulary.DAYS), rng.choice(HOURS)
    free = _free_hours(app, day)
    later = [other for other in free if other > hour]
    if hour not in free and not later:
        return None
    prompts = [
        f"Plan '{title}' on {day} at {hour}. If taken, the next free hour.",
        f"I want '{title}' on {day} at {hour}, or else at the next free hour.",
    ]
    calls = [call("create_event", title=title, day=day, hour=hour)]
    if hour in free:
        return TaskDraft(prompts=prompts, calls=calls)
    calls.append(call("create_event", title=title, day=day, hour=later[0]))
    return TaskDraft(prompts=prompts, calls=calls, expected_errors=1)


@outlook.template(difficulty=2)
def code_in_mail(app: App, rng: Random) -> TaskDraft | None:
    mail = _inbox_mail(app, rng, "code")
    if mail is None:
        return None
    prompts = [
        f"What is the door code in '{mail['subject']}' in my Inbox?",
        f"Which code does '{mail['subject']}' in my Inbox give?",
        f"Find the door code that the mail '{mail['subject']}' in Inbox names.",
    ]
    listed = call("list_messages", folder="Inbox")
    read = call("get_message", message_id=mail["id"])
    return TaskDraft(
        prompts=prompts, calls=[listed, read], answer=mail["body"].split()[-1], answer_kind="number"
    )


@outlook.template(difficulty=3)
def file_all_from(app: App, rng: Random) -> TaskDraft | None:
    mail, folder = _mail(app, rng), rng.choice(vocabulary.FOLDERS)
    sender = mail["sender"]
    sql = "select id from messages where folder = 'Inbox' and sender = ? order by id"
    ids = app.db.column(sql, sender)
    if not 2 <= len(ids) <= 3:
        return None
    prompts = [
        f"Move every mail from {sender} in my Inbox to {folder}.",
        f"File all mail of {sender} in Inbox under {folder}.",
    ]
    calls = [call("list_messages", folder="Inbox")]
    calls += [call("update_message", message_id=one, folder=folder) for one in ids]
    return TaskDraft(prompts=prompts, calls=calls)


@outlook.template(difficulty=1, held_out=True)
def edge_of_day(app: App, rng: Random) -> TaskDraft:
    day = rng.choice(vocabulary.DAYS)
    events = list_events(app, day)
    end, event = rng.choice([("first", events[0]), ("last", events[-1])])
    prompts = [f"What is my {end} event on {day}?", f"Which event is {end} on {day}?"]
    calls = [call("list_events", day=day)]
    return TaskDraft(prompts=prompts, calls=calls, answer=event["title"], answer_kind="title")


@outlook.template(difficulty=2, held_out=True)
def file_and_answer(app: App, rng: Random) -> TaskDraft:
    mail, folder, remark = (
        _mail(app, rng),
        rng.choice(vocabulary.FOLDERS),
        rng.choice(vocabulary.REMARKS),
    )
    prompts = [
        f"Move '{mail['subject']}' from Inbox to {folder} and send its sender '{remark}'.",
        f"Send '{remark}' to the sender of '{mail['subject']}' in Inbox, then move it to {folder}.",
    ]
    calls = [
        call("list_messages", folder="Inbox"),
        call("update_message", message_id=mail["id"], folder=folder),
        call("create_message", to=mail["sender"], body=remark),
    ]
    return TaskDraft(prompts=prompts, calls=calls)
