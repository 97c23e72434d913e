"""Value types that all other packages share: configuration, plan, network, schedule actions, costs, records, errors.

They are frozen, comparable, and convert to and from JSON. No module here touches a tensor, a device or a process group
(standard library and pydantic only).
"""
