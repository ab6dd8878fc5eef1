"""Dagster components: topics, groups, consumers and checkers of a project, declared in YAML.

Each makes what its Python counterpart makes, by the same calls. One ``BrokerComponent`` brings what
a code location has once; ``docs/components.md`` has the attributes.
"""
