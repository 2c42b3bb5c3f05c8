# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire beside tensors: one type for every request of the server and every reply of a hospital.

``requests`` and ``replies`` are the types, ``bounded`` is what all of them are made of, ``text`` is how they look on
the wire. What a reply may say beyond its type is decided by what was asked: see ``rounds.server.answers``.
"""
