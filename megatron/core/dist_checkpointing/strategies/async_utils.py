from megatron.core.dist_checkpointing.verdict import shared_verdict


class AsyncRequest:
    """A save that is to be written."""

    def execute_sync(self) -> None:
        """Write this rank's part now, then finalize; collective over the world.

        Raises:
            CheckpointingException: the same text on every rank, when one of them failed.
        """
        from megatron.core.dist_checkpointing.strategies.filesystem_async import (
            discard_write_results,
            stage_for_sync,
        )

        try:
            with shared_verdict('write the checkpoint'):
                async_fn_args = list(self.async_fn_args)
                if self.preload_fn is not None:
                    assert len(async_fn_args) == 3, "Expected 3 args to be passed to async function"
                    async_fn_args[1] = stage_for_sync(self.preload_fn)
                if self.async_fn is not None:
                    self.async_fn(*async_fn_args, **self.async_fn_kwargs)
        except BaseException:
            discard_write_results()  # or the next save would take them for its own
            raise
        for finalize_fn in self.finalize_fns:
            finalize_fn()
