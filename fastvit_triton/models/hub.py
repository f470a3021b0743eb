"""Methods of every model that load it from the Hugging Face Hub or a folder, save it, and publish it."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

publish: Any = None  # `weights.publish`, which `models` sets: it imports all models, which have these methods


class HubMethods:
    """`from_pretrained`, `save_pretrained` and `push_to_hub`, with the meaning they have in PyTorchModelHubMixin.

    They are our own methods, which call the Hub's client when they are called: to inherit the mixin would import the
    client with this package, and the mixin rebuilds a model from its constructor's arguments, which are modules here.
    """

    # facts of the weights with timm's keys, such as mean and std; empty if unknown
    pretrained_cfg: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        force_download: bool | None = None,
        local_files_only: bool | None = None,
        **overrides: Any,
    ) -> Any:
        """Loads a model in evaluation mode.

        Args:
            pretrained_model_name_or_path: as for `load_model`, or "org/name" on the Hub.
            revision: branch, tag or commit on the Hub.
            token: login; None uses the one that is stored, False none.
            cache_dir: folder for downloads instead of the client's.
            force_download: download again what is in the cache.
            local_files_only: use the cache only.
            **overrides: options of `create_model` that replace those of the checkpoint, such as num_classes.

        Raises:
            WeightsError: as for `load_model`, or the model is not of this class.
        """
        hub = dict(revision=revision, token=token, cache_dir=cache_dir)
        hub |= dict(force_download=force_download, local_files_only=local_files_only)
        return publish.from_pretrained(cls, pretrained_model_name_or_path, hub, overrides)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *,
        metadata: Mapping[str, str] | None = None,
        license: str | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> str | None:
        """Writes model.safetensors, config.json and a model card, README.md, which `from_pretrained` and timm read.

        Args:
            save_directory: a folder, which is created; its README.md stays as it is if it has one.
            metadata: header of the file from which the model was loaded, for its classes, metrics and recipe.
            license: licence of the weights for the model card, as the Hub names it, such as "apache-2.0"; None means
                that of published weights, else the card says that it is unknown.
            repo_id: repository to publish to, by default the name of the folder.
            push_to_hub: publish, too.
            **options: of `push_to_hub`.

        Returns:
            The URL of the commit, if published.

        Raises:
            WeightsError: the files cannot be written, or not published.
        """
        publish.save_pretrained(self, save_directory, metadata, license=license)
        if not push_to_hub:
            return None
        name = repo_id or os.path.basename(os.path.abspath(save_directory))
        return self.push_to_hub(name, metadata=metadata, license=license, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        license: str | None = None,
        commit_message: str = "Push model using fastvit_triton",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
    ) -> str:
        """Publishes the files of `save_pretrained` on the Hub; creates the repository if there is none.

        Args:
            repo_id: "org/name", or "name" for the user's own.
            metadata: as for `save_pretrained`; folders of this machine in it are not published.
            license: as for `save_pretrained`.
            commit_message: message of the commit.
            private: create a private repository.
            token: login; None uses the one that is stored.
            branch: branch to commit to.
            create_pr: open a pull request instead.

        Returns:
            The URL of the commit.

        Raises:
            WeightsError: the client is not installed, there is no token, or the Hub refuses.
        """
        commit = dict(commit_message=commit_message, revision=branch, create_pr=create_pr)
        return publish.push_to_hub(self, repo_id, metadata, token, private, license, commit)
