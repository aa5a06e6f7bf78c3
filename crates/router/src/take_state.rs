//! Which cluster states a router takes up: newer ones, and none that knows nothing of workers that answer.

use std::sync::{Arc, atomic::Ordering};

use kvist_errors::KvistError;
use kvist_events::is_of_strange_store;
use kvist_link::LinkState;
use kvist_proto::controller::v1::ClusterState;

use crate::{
    cluster::{ClusterView, decode_state, version_of},
    core::{Feed, RouterCore},
    held_state::HeldState,
};

impl RouterCore {
    /// Takes up an encoded `ClusterState`. False when it is no newer than the present one, or is held back. Called within
    /// a runtime.
    ///
    /// # Errors
    /// The state is invalid; the present one stays.
    pub fn apply_cluster_state(&self, bytes: &[u8]) -> Result<bool, KvistError> {
        self.take_cluster_state(bytes).inspect_err(|_| self.metrics.state_ignored("invalid"))
    }

    fn take_cluster_state(&self, bytes: &[u8]) -> Result<bool, KvistError> {
        let state = decode_state(bytes)?;
        let mut held = self.held_state.lock();
        let old = self.view();
        let version = version_of(&state);
        if self.has_state.load(Ordering::Acquire) {
            if version <= old.version {
                if version < old.version {
                    self.metrics.state_ignored("older");
                }
                return Ok(false);
            }
            let known = old.workers.values().map(|node| (&node.uid, node.incarnation));
            if is_of_strange_store(old.version.store_epoch, known, &state) {
                self.hold(&mut held, state, &old);
                return Ok(false);
            }
        }
        self.take_up(state, &old)?;
        self.let_go(&mut held);
        Ok(true)
    }

    /// Takes up a state that was held back, once none of the workers that it does not know has answered for a while.
    /// Called within a runtime, once a second.
    pub(crate) fn review_held_state(&self) {
        let mut place = self.held_state.lock();
        let Some(held) = place.as_mut() else { return };
        let old = self.view();
        let mut connections = old.workers.values().filter_map(|node| node.connection.as_ref());
        let is_answered = connections.any(|connection| connection.link.state() == LinkState::Connected);
        if !held.is_believed(self.started.elapsed(), is_answered) {
            return;
        }
        if let Some(held) = self.let_go(&mut place) {
            // It was read when it came.
            if let Err(error) = self.take_up(held.into_state(), &old) {
                tracing::error!(%error, "cluster_state_refused");
            }
        }
    }

    fn hold(&self, place: &mut Option<HeldState>, state: ClusterState, old: &ClusterView) {
        self.metrics.state_ignored("held");
        self.metrics.held_state.set(1);
        let version = version_of(&state);
        if place.as_ref().is_none_or(|held| held.version().store_epoch != version.store_epoch) {
            tracing::error!(
                store_epoch = version.store_epoch,
                revision = version.revision,
                present_store_epoch = old.version.store_epoch,
                present_revision = old.version.revision,
                workers = old.workers.len(),
                "cluster_state_held"
            );
        }
        match place {
            Some(held) => held.take(state),
            None => *place = Some(HeldState::new(state, self.started.elapsed())),
        }
    }

    fn let_go(&self, place: &mut Option<HeldState>) -> Option<HeldState> {
        let held = place.take()?;
        self.metrics.held_state.set(0);
        let version = held.version();
        tracing::info!(store_epoch = version.store_epoch, revision = version.revision, "cluster_state_let_go");
        Some(held)
    }

    fn take_up(&self, state: ClusterState, old: &ClusterView) -> Result<(), KvistError> {
        let version = version_of(&state);
        let view = Arc::new(self.connector.view(state, old)?);
        for (worker, up_to) in &view.dead {
            self.selector.index.close(worker, *up_to);
        }
        match self.feed.load().as_deref() {
            Some(Feed::Bus(keeper)) => keeper.follow(&view),
            Some(Feed::Direct(followers)) => followers.follow(&view),
            None => {}
        }
        tracing::info!(
            store_epoch = version.store_epoch,
            revision = version.revision,
            models = view.models_by_name().len(),
            workers = view.workers.len(),
            "cluster_state_applied"
        );
        self.view.store(view);
        self.has_state.store(true, Ordering::Release);
        if !self.is_draining() {
            self.ready.set_ready();
            self.serving.send_replace(true);
        }
        Ok(())
    }
}
