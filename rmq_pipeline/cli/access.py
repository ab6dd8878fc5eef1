"""``rmq user``: users; ``rmq acl``: their policies on topics, groups, namespaces, the cluster."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, examples, stdin, user_names
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.errors import RequestError

user_app = typer.Typer(
    no_args_is_help=True,
    help="Users: create, alter, delete, list. The first user turns access control on: calls then "
    "need credentials, except from users who can read the broker's home.",
)

USER_COLUMNS = ("name", "type", "disabled", "created_at_ms", "altered_at_ms")

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

acl_app = typer.Typer(
    no_args_is_help=True,
    help="Policies of users. Access is denied unless a policy allows it. The most specific policy "
    "wins; on a tie, deny wins.",
)

POLICY_COLUMNS = ("user", "resource", "effect", "actions", "sources", "tier")

Resource = Annotated[
    str,
    typer.Argument(
        metavar="RESOURCE",
        help="topic:NAME, group:NAME, namespace:NAME or cluster:DefaultCluster. NAME may end with "
        "a star, which matches any rest; * alone matches every resource.",
    ),
]
Actions = Annotated[
    str,
    typer.Option(
        metavar="ACTION,…", help="Some of pub, sub, create, update, delete, get, list; or all."
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="ADDRESS",
        help="Only for calls from this address or network: 10.1.2.3, 10.1.0.0/16. Repeatable.",
    ),
]
IsDefault = Annotated[
    bool,
    typer.Option("--default", help="Applies only if no policy without this option applies."),
]


@user_app.command(
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
    _show_user(user, as_json=as_json)


@user_app.command(
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
    _show_user(user, as_json=as_json)


@user_app.command("delete", epilog=examples("rmq user delete billing"))
def delete_user(
    name: User, *, home: Home = None, flight: Flight = None, as_json: AsJson = False
) -> None:
    """Delete a user and the user's policies. Without users, every caller may do everything."""
    with connected(home, flight) as client:
        gone = client.delete_user(name)
    if as_json:
        show_fields({"name": name, **gone}, as_json=True)
    else:
        show_message(f"Deleted user {name} with {gone['policies']} policies.")


@user_app.command("list", epilog=examples("rmq user list", "rmq user list --json"))
def list_users(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """List users; passwords are never shown."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_users())
    empty = "There are no users: every caller may do everything."
    show_rows(rows, as_json=as_json, columns=USER_COLUMNS, empty=empty)


def _show_user(user: dict[str, Any], *, as_json: bool) -> None:
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


def _put_as(effect: str) -> Callable[..., None]:
    """Make the command that writes policies with this effect."""

    def put(
        user: User,
        resource: Resource,
        *,
        actions: Actions,
        sources: Sources = None,
        is_default: IsDefault = False,
        home: Home = None,
        flight: Flight = None,
        as_json: AsJson = False,
    ) -> None:
        with connected(home, flight) as client:
            policy = client.put_policy(
                user,
                resource=resource,
                actions=actions.split(","),
                effect=effect,
                sources=sources or (),
                tier="default" if is_default else "custom",
            )
        _show_policy(policy, as_json=as_json)

    return put


acl_app.command(
    "allow",
    help="Allow a user actions on a resource. Replaces the user's allow policy on that resource.",
    epilog=examples(
        "rmq acl allow billing topic:orders --actions sub",
        "rmq acl allow billing group:billing --actions sub",
        "rmq acl allow shop 'topic:shop-*' --actions pub,get --from 10.1.0.0/16",
        "rmq acl allow team namespace:team --actions all",
    ),
)(_put_as("allow"))
acl_app.command(
    "deny",
    help="Deny a user actions on a resource. Replaces the user's deny policy on that resource.",
    epilog=examples("rmq acl deny shop topic:shop-ledger --actions pub"),
)(_put_as("deny"))


@acl_app.command("list", epilog=examples("rmq acl list", "rmq acl list billing --json"))
def list_policies(
    user: Annotated[str | None, typer.Argument(metavar="USER", autocompletion=user_names)] = None,
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """List the policies of a user, or of all users."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_policies(user))
    if not as_json:
        rows = [_on_one_line(row) for row in rows]
    show_rows(rows, as_json=as_json, columns=POLICY_COLUMNS, empty="There are no policies.")


@acl_app.command(
    "delete",
    epilog=examples(
        "rmq acl delete billing topic:orders", "rmq acl delete shop topic:shop-ledger --effect deny"
    ),
)
def delete_policy(
    user: User,
    resource: Resource,
    *,
    effect: Annotated[
        str | None, typer.Option(metavar="allow|deny", help="Only policies with this effect.")
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Delete a user's policies on a resource, written exactly as in `rmq acl list`."""
    with connected(home, flight) as client:
        gone = client.delete_policy(user, resource=resource, effect=effect)
    if as_json:
        show_fields({"user": user, "resource": resource, **gone}, as_json=True)
    else:
        show_message(f"Deleted {gone['deleted']} policies of user {user} on {resource}.")


@acl_app.command(
    "test",
    epilog=examples(
        "rmq acl test billing topic:orders sub",
        "rmq acl test shop topic:shop-1 pub --from 10.1.2.3",
    ),
)
def explain(
    user: User,
    *,
    resource: Annotated[
        str, typer.Argument(metavar="RESOURCE", help="One resource: TYPE:NAME, without a star.")
    ],
    action: Annotated[str, typer.Argument(metavar="ACTION")],
    source: Annotated[
        str, typer.Option("--from", metavar="ADDRESS", help="The caller's IP address.")
    ] = "",
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Test whether a user may do an action, and show the deciding policy. Exit code 1: denied."""
    with connected(home, flight) as client:
        verdict = client.explain_access(user, resource=resource, action=action, source=source)
    if as_json:
        show_fields(verdict, as_json=True)
    else:
        may = "may" if verdict["allowed"] else "may not"
        show_message(f"{user} {may} {action} {resource}: {verdict['because']}.")
    if not verdict["allowed"]:
        raise typer.Exit(1)


def _show_policy(policy: dict[str, Any], *, as_json: bool) -> None:
    show_fields(policy if as_json else _on_one_line(policy), as_json=as_json)


def _on_one_line(policy: dict[str, Any]) -> dict[str, Any]:
    actions, sources = ", ".join(policy["actions"]), ", ".join(policy["sources"]) or "anywhere"
    return {**policy, "actions": actions, "sources": sources}
