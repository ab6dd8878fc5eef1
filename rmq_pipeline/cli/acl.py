"""``rmq acl``: policies of users on topics, consumer groups, namespaces and the cluster."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, examples, user_names
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows

app = typer.Typer(
    no_args_is_help=True,
    help="Policies of users. Access is denied unless a policy allows it. The most specific policy "
    "wins; on a tie, deny wins.",
)

COLUMNS = ("user", "resource", "effect", "actions", "sources", "tier")

User = Annotated[str, typer.Argument(metavar="USER", autocompletion=user_names)]
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
        _show(policy, as_json=as_json)

    return put


app.command(
    "allow",
    help="Allow a user actions on a resource. Replaces the user's allow policy on that resource.",
    epilog=examples(
        "rmq acl allow billing topic:orders --actions sub",
        "rmq acl allow billing group:billing --actions sub",
        "rmq acl allow shop 'topic:shop-*' --actions pub,get --from 10.1.0.0/16",
        "rmq acl allow team namespace:team --actions all",
    ),
)(_put_as("allow"))
app.command(
    "deny",
    help="Deny a user actions on a resource. Replaces the user's deny policy on that resource.",
    epilog=examples("rmq acl deny shop topic:shop-ledger --actions pub"),
)(_put_as("deny"))


@app.command("list", epilog=examples("rmq acl list", "rmq acl list billing --json"))
def list_(
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
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty="There are no policies.")


@app.command(
    epilog=examples(
        "rmq acl delete billing topic:orders", "rmq acl delete shop topic:shop-ledger --effect deny"
    )
)
def delete(
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


@app.command(
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


def _show(policy: dict[str, Any], *, as_json: bool) -> None:
    show_fields(policy if as_json else _on_one_line(policy), as_json=as_json)


def _on_one_line(policy: dict[str, Any]) -> dict[str, Any]:
    actions, sources = ", ".join(policy["actions"]), ", ".join(policy["sources"]) or "anywhere"
    return {**policy, "actions": actions, "sources": sources}
