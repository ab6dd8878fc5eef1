"""``rmq acl``: what users may do with topics, consumer groups, namespaces and the broker."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, examples, user_names
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows

app = typer.Typer(
    no_args_is_help=True,
    help="Policies: what users may do. What no policy allows is refused; the nearest one decides, "
    "and of two as near the one that denies.",
)

COLUMNS = ("user", "resource", "effect", "actions", "sources", "tier")

User = Annotated[str, typer.Argument(metavar="USER", autocompletion=user_names)]
Resource = Annotated[
    str,
    typer.Argument(
        metavar="RESOURCE",
        help="topic:NAME, group:NAME, namespace:NAME or cluster:DefaultCluster; a star may end the "
        "name, or be it; a star alone is everything.",
    ),
]
Actions = Annotated[
    str,
    typer.Option(
        metavar="ACTION,…", help="Of pub, sub, create, update, delete, get, list; or all."
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="ADDRESS",
        help="Only for calls from there: 10.1.2.3 or 10.1.0.0/16. Repeat it for more.",
    ),
]
IsDefault = Annotated[
    bool,
    typer.Option("--default", help="Counts only where no policy without this option fits."),
]


def _put_as(effect: str) -> Callable[..., None]:
    """The command that writes policies of one effect."""

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
    help="Let a user do something; in the place of what it was allowed on the same resource.",
    epilog=examples(
        "rmq acl allow billing topic:orders --actions sub",
        "rmq acl allow billing group:billing --actions sub",
        "rmq acl allow shop 'topic:shop-*' --actions pub,get --from 10.1.0.0/16",
        "rmq acl allow team namespace:team --actions all",
    ),
)(_put_as("allow"))
app.command(
    "deny",
    help="Forbid a user something; in the place of what it was denied on the same resource.",
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
    """List policies, of one user or of all."""
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
        str | None, typer.Option(metavar="allow|deny", help="Only what allows, or denies.")
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Delete a user's policies of a resource, as they were written."""
    with connected(home, flight) as client:
        gone = client.delete_policy(user, resource=resource, effect=effect)
    if as_json:
        show_fields({"user": user, "resource": resource, **gone}, as_json=True)
    else:
        show_message(f"{gone['deleted']} of user {user}'s policies of {resource} are deleted.")


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
        str, typer.Argument(metavar="RESOURCE", help="One thing: TYPE:NAME, without a star.")
    ],
    action: Annotated[str, typer.Argument(metavar="ACTION")],
    source: Annotated[
        str, typer.Option("--from", metavar="ADDRESS", help="Where the call would come from.")
    ] = "",
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Whether a user may do something, and which policy decides it; exit code 1: it may not."""
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
