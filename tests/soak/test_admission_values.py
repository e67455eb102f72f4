"""The values of `admissionPolicy` that open and close namespaces, on a real API server that forbids nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.soak.api import Api, eventually, llmd, llmd_path
from tests.soak.chart import OWN_POLICIES, judged, refusal
from tests.soak.experiments import NAME, spec_a
from tests.soak.foreign_objects import CHILDREN, owned, path_of
from tests.soak.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900), pytest.mark.deep]
PATH, BODY = CHILDREN["ConfigMap"]()
DISCOVERED_SECONDS = 90


@pytest_asyncio.fixture(loop_scope="session")
async def operator(where: World) -> AsyncIterator[Api]:
    """The API server as the operator's user."""
    api = Api(where.plane.url, "operator", where.plane.ssl_context())
    yield api
    await api.close()


async def said(operator: Api, namespace: str) -> str:
    """What is said against a child in the namespace."""
    return await refusal(operator, "POST", path_of(PATH, namespace), owned(BODY))


async def test_namespaces_are_opened_by_name_and_closed_by_labels(where: World, operator: Api) -> None:
    values = ('admissionPolicy.allowedNamespaces=["kube-public"]', 'admissionPolicy.namespaceLabels.models="yes"')
    unlabelled, labelled = await where.namespace("unlabelled"), await where.namespace("labelled")
    await where.admin.merge(f"/api/v1/namespaces/{labelled}", {"metadata": {"labels": {"models": "yes"}}})
    async with judged(where.admin, operator, values):
        assert await said(operator, "kube-public") == ""
        assert await said(operator, labelled) == ""
        assert "it lacks the labels models=yes" in await said(operator, unlabelled)


async def test_with_watched_namespaces_all_others_are_closed(where: World, operator: Api) -> None:
    other = await where.namespace("other")
    async with judged(where.admin, operator, ('operator.watchNamespaces=["kube-public"]',)):
        assert await said(operator, "kube-public") == ""
        assert "it is not one of operator.watchNamespaces" in await said(operator, other)


async def test_where_it_is_required_a_namespace_without_an_llmdeployment_is_closed(where: World, operator: Api) -> None:
    empty, used = await where.namespace("empty"), await where.namespace("used")
    await where.admin.create(llmd_path(used), llmd(NAME, spec_a()))
    async with judged(where.admin, operator, ("admissionPolicy.requireLLMDeployment=true",)):
        await eventually(
            lambda: said(operator, used), lambda words: words == "", what="discovered", seconds=DISCOVERED_SECONDS
        )
        words = await said(operator, empty)
    await where.admin.delete(llmd_path(used, NAME))
    assert f"millstream-namespaces{OWN_POLICIES}" in words
    assert "no params found" in words
