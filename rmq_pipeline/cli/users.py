"""``rmq user``: create, alter, delete and list users."""

from typing import Annotated, Any

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, examples, stdin, user_names
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.errors import RequestError

app = typer.Typer(
    no_args_is_help=True,
    help="Users: create, alter, delete, list. The first user turns access control on: calls then "
    "need credentials, except from users who can read the broker's home.",
)

COLUMNS = ("name", "type", "disabled", "created_at_ms", "altered_at_ms")

User = Annotated[str, typer.Argument(metavar="USER", autocompletion=user_names)]
PasswordFile = Annotated[
    str | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="File with the password in its first line; - is stdin. If omitted, the broker "
        "generates a password and shows it once.",
    ),
]


@app.command(
    epilog=examples(
        "rmq user create admin --super",
        "rmq user create billing",
        "rmq user create billing --password-file - < secret",
    )
)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    is_super: Annotated[
        bool, typer.Option("--super", help="May do everything, without policies.")
    ] = False,
    password_file: PasswordFile = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Create a user; RocketMQ clients call name and password access key and secret key."""
    password = _password(password_file)
    with connected(home, flight) as client:
        user = client.create_user(name, password=password, type="super" if is_super else "normal")
    _show(user, as_json=as_json)


@app.command(
    epilog=examples(
        "rmq user alter billing --new-password",
        "rmq user alter billing --disable",
        "rmq user alter admin --normal",
    )
)
def alter(
    name: User,
    *,
    new_password: Annotated[
        bool, typer.Option("--new-password", help="Generate a new password and show it once.")
    ] = False,
    password_file: PasswordFile = None,
    is_super: Annotated[bool | None, typer.Option("--super/--normal")] = None,
    disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Refuse or accept the user's calls.")
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a user; omitted fields stay as they are."""
    password = _password(password_file)
    kind = None if is_super is None else "super" if is_super else "normal"
    with connected(home, flight) as client:
        user = client.alter_user(
            name, password=password, renew_password=new_password, type=kind, disabled=disabled
        )
    _show(user, as_json=as_json)


@app.command(epilog=examples("rmq user delete billing"))
def delete(
    name: User, *, home: Home = None, flight: Flight = None, as_json: AsJson = False
) -> None:
    """Delete a user and the user's policies. Without users, every caller may do everything."""
    with connected(home, flight) as client:
        gone = client.delete_user(name)
    if as_json:
        show_fields({"name": name, **gone}, as_json=True)
    else:
        show_message(f"Deleted user {name} with {gone['policies']} policies.")


@app.command("list", epilog=examples("rmq user list", "rmq user list --json"))
def list_(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """List users; passwords are never shown."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_users())
    empty = "There are no users: every caller may do everything."
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty=empty)


def _show(user: dict[str, Any], *, as_json: bool) -> None:
    show_fields(user, as_json=as_json)
    if "password" in user and not as_json:
        show_message("Keep the password: the broker does not show it again.")


def _password(file: str | None) -> str | None:
    """Read a password from the first line of a file, or of stdin; None without a file."""
    if file is None:
        return None
    if file == "-":
        line = stdin().readline()
    else:
        with open(file, encoding="utf-8") as source:  # noqa: PTH123 - the name is a user's
            line = source.readline()
    password = line.rstrip("\r\n")
    if not password:
        raise RequestError(
            f"The first line of {file} is empty.", remedy="Write the password in its first line."
        )
    return password
