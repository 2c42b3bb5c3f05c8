# SPDX-License-Identifier: Apache-2.0
"""Whether the key that all hospitals share, where a site file names it, can be used here."""

from collections.abc import Iterator

from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.data.site_file import SiteFile
from medpfl.flare.finding import Finding, ok, problem
from medpfl.privacy.keys import read_key


def common_key(site_file: SiteFile) -> Iterator[Finding]:
    """Its fingerprint, which must be the same at all hospitals; nothing where no key is named."""
    check = "encryption key"
    if site_file.keys is None:
        return
    path = site_file.key_file()
    try:
        yield ok(check, f"{path}, fingerprint {read_key(path).fingerprint}, for its owner's eyes only")
    except ConfigError:
        yield problem(check, f"{path} cannot be used without TenSEAL", "pip install 'medpfl[privacy]'")
    except MedPFLError as error:
        again = "where it is missing or damaged, carry the file of 'medpfl keys make' here again, by hand"
        yield problem(check, str(error), f"chmod 600 {path}; {again}")
