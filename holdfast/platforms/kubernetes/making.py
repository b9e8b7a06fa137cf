"""Makes the objects that a job needs beside its worker pods, once, and keeps off those of others."""

from __future__ import annotations

import base64
import secrets

from holdfast.errors import ApiRefused, PlatformError
from holdfast.platforms.kubernetes import objects
from holdfast.platforms.kubernetes.client import MERGE, Json, KubeApi, find
from holdfast.platforms.kubernetes.objects import OPENED, TOKEN_KEY, Owner
from holdfast.platforms.kubernetes.spec import JobSpec

VOLCANO = "scheduling.volcano.sh/v1beta1"


class JobObjects:
    """The objects of one job. What is there already stays as it is."""

    def __init__(self, api: KubeApi, owner: Owner) -> None:
        self._api, self._owner = api, owner

    async def make(self, spec: JobSpec) -> tuple[str, str]:
        """Make all that a job needs before its pods; its token, and what it was opened with."""
        owner = self._owner
        fresh = objects.secret(owner, spec, secrets.token_urlsafe(32))
        made = await self.one(owner.path("secrets"), fresh)
        token = base64.b64decode((made.get("data") or {}).get(TOKEN_KEY, "")).decode()
        opened = (made["metadata"].get("annotations") or {}).get(OPENED, spec.scale)
        await self.one(owner.path("services"), objects.service(owner, spec))
        claim = objects.journal_claim(owner, spec)
        if claim is not None:
            await self.one(owner.path("persistentvolumeclaims"), claim)
        await self.make_budget(spec)
        group = objects.pod_group(owner, spec)
        if group is not None:
            await self._make_gang(group)
        return token, opened

    async def _make_gang(self, group: Json) -> None:
        try:
            await self.one(self._owner.path_in(VOLCANO, "podgroups"), group)
        except ApiRefused as refused:
            if refused.code != 404:
                raise
            raise PlatformError(
                "spec.gang: this cluster has no PodGroup of Volcano; install Volcano, or leave it out"
            ) from None

    async def make_budget(self, spec: JobSpec) -> None:
        """Make the disruption budget, in the version that the server has, or bring it up to date."""
        for version in ("v1", "v1beta1"):
            path = self._owner.path_in(f"policy/{version}", "poddisruptionbudgets")
            budget = objects.disruption_budget(self._owner, spec, version)
            if budget is None:
                await self.delete(f"{path}/{self._owner.name}")
                continue
            try:
                made = await self.one(path, budget)
            except ApiRefused as refused:
                if refused.code == 404:
                    continue
                raise
            if made["spec"].get("minAvailable") != spec.budget:
                change = {"spec": {"minAvailable": spec.budget}}
                await self._api.request("PATCH", f"{path}/{self._owner.name}", change, MERGE)
            return

    async def one(self, path: str, wanted: Json) -> Json:
        """Create an object, or return the one of this name, if it is this job's."""
        name = wanted["metadata"]["name"]
        found = await find(self._api, f"{path}/{name}")
        if found is None:
            try:
                return await self._api.request("POST", path, wanted)
            except ApiRefused as refused:
                if refused.reason != "AlreadyExists":
                    raise
                found = await self._api.request("GET", f"{path}/{name}")
        if not self._owner.owns(found):
            raise PlatformError(
                f"there is a {wanted['kind']} {name} that is not this job's; delete it, or rename the"
                " job"
            )
        return found

    async def delete(self, path: str, now: bool = False) -> None:
        """Delete an object, at once if it shall have no time to end; what is gone is no error."""
        query = {"gracePeriodSeconds": "0"} if now else {}
        try:
            await self._api.request("DELETE", path, None, "", **query)
        except ApiRefused as refused:
            if refused.code != 404:
                raise
