//! A cluster state that is not believed yet: it knows none of the workers, and they answer.

use std::time::Duration;

use kvist_proto::controller::v1::ClusterState;

use crate::cluster::{StateVersion, version_of};

/// For how long no worker may have answered until the absence of all is believed. A connection that breaks is made anew
/// within seconds, and whoever asks meanwhile cannot be answered in either state.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

/// The newest such state.
#[derive(Debug)]
pub(crate) struct HeldState {
    state: ClusterState,
    /// When a worker of the present state last answered, or the first such state came.
    answered_at: Duration,
}

impl HeldState {
    /// Holds a state that has come now.
    pub(crate) fn new(state: ClusterState, now: Duration) -> Self {
        Self { state, answered_at: now }
    }

    /// Its place in history.
    pub(crate) fn version(&self) -> StateVersion {
        version_of(&self.state)
    }

    /// Holds a newer one instead; one that is older comes from a controller that lags.
    pub(crate) fn take(&mut self, state: ClusterState) {
        if version_of(&state) > self.version() {
            self.state = state;
        }
    }

    /// Notes whether any worker of the present state answers at this moment, and says whether the held one is believed.
    pub(crate) fn is_believed(&mut self, now: Duration, is_answered: bool) -> bool {
        if is_answered {
            self.answered_at = now;
        }
        now.saturating_sub(self.answered_at) >= SILENCE
    }

    /// The state, to be taken up.
    pub(crate) fn into_state(self) -> ClusterState {
        self.state
    }
}

#[cfg(test)]
mod tests {
    use kvist_proto::controller::v1::ClusterVersion;
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn state(revision: u64) -> ClusterState {
        ClusterState { version: Some(ClusterVersion { store_epoch: 2, revision }), ..ClusterState::default() }
    }

    #[test]
    fn the_newest_is_held() {
        let mut held = HeldState::new(state(5), Duration::ZERO);
        for (offered, kept) in [(4, 5), (6, 6), (6, 6)] {
            held.take(state(offered));
            assert_eq!(StateVersion { store_epoch: 2, revision: kept }, held.version());
        }
        assert_eq!(state(6), held.into_state());
    }

    proptest! {
        /// Looked at once a second, whatever else happens, and however often newer ones come.
        #[test]
        fn it_is_believed_after_thirty_seconds_without_an_answer(answers in vec(any::<bool>(), 1..90)) {
            let mut held = HeldState::new(state(1), Duration::ZERO);
            let mut silent_seconds = 0;
            for (second, is_answered) in answers.into_iter().enumerate() {
                silent_seconds = if is_answered { 0 } else { silent_seconds + 1 };
                held.take(state(second as u64));
                let now = Duration::from_secs(second as u64 + 1);
                prop_assert_eq!(silent_seconds >= 30, held.is_believed(now, is_answered));
            }
        }
    }
}
