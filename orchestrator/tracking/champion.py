"""The champion: the registered model version of the run that is served, and the one before it."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from orchestrator.config import Experiment
from orchestrator.tracking import entries
from orchestrator.tracking.reading import Recorded, recorded
from orchestrator.tracking.store import connect, is_missing, store_uri, translate_errors

CHAMPION = "champion"
PREVIOUS = "previous"


def set_champion(experiment: Experiment, run_id: str, tags: Mapping[str, str] | None = None) -> str:
    """Make a run the champion; the champion before it becomes `previous`. Returns the registered version.

    Call it after the promotion is verified. tags (the Serve application, whether promotion was forced) are set on
    the version.
    """
    uri, name = store_uri(experiment), model_name(experiment)
    with translate_errors(uri, f"run {run_id!r} cannot become the champion"):
        client = connect(uri)
        run = client.get_run(run_id)
        aliases = _aliases(client, name)
        if aliases is None:
            client.create_registered_model(name)
        versions = client.search_model_versions(f"run_id = '{run_id}'")
        version = next((v.version for v in versions if v.name == name), None)
        if version is None:
            version = client.create_model_version(name, source=run.info.artifact_uri, run_id=run_id).version
        for key, value in {"trial": str(run.info.run_name), **(tags or {})}.items():
            client.set_model_version_tag(name, version, key, value)
        client.set_tag(run_id, "champion", f"{name} version {version}")
        _move_champion(client, name, str(version), (aliases or {}).get(CHAMPION))
    return str(version)


def champion(experiment: Experiment) -> Recorded | None:
    """The run that was promoted last; None before the first promotion."""
    return _aliased(experiment, CHAMPION)


def previous(experiment: Experiment) -> Recorded | None:
    """The champion before this one, the target of a rollback; None when there was none."""
    return _aliased(experiment, PREVIOUS)


def model_name(experiment: Experiment) -> str:
    """The registered model that holds the champions of an experiment."""
    return next(iter(entries.safe_names([experiment.tracking_name]).values())).replace("/", "_")


def _move_champion(client: MlflowClient, name: str, version: str, before: str | None) -> None:
    if before is not None and before != version:
        client.set_registered_model_alias(name, PREVIOUS, before)
    client.set_registered_model_alias(name, CHAMPION, version)


def _aliases(client: MlflowClient, name: str) -> dict[str, str] | None:
    """Alias -> version of a registered model; None when the model is not registered."""
    try:
        return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _aliased(experiment: Experiment, alias: str) -> Recorded | None:
    uri, name = store_uri(experiment), model_name(experiment)
    if is_missing(uri):
        return None
    with translate_errors(uri, f"the {alias} of {name!r} cannot be read"):
        client = connect(uri)
        version = (_aliases(client, name) or {}).get(alias)
        if version is None:
            return None
        run = client.get_run(str(client.get_model_version(name, version).run_id))
    return recorded(client, uri, run)
