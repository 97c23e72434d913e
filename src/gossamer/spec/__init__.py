"""Values: what every other room speaks in.

Clusters, profiles, plans, actions, costs, records, choices and errors: frozen, comparable, to and from JSON.
Nothing here touches a tensor, a device, a file or a process (standard library and pydantic only).
"""
