//! A cluster state of a store that has never known the workers says nothing about them.
//!
//! Within an epoch of the store, absence is a statement: the same history named the worker before. A new epoch that names
//! no worker at all may be that of an empty store (a wrong data folder, a restore from nothing), and then its silence is
//! ignorance. Unknown is neutral.

use kvist_blocks::{Incarnation, WorkerUid};
use kvist_proto::controller::v1::ClusterState;

/// Whether a newer state leaves out every worker without having known any.
///
/// * `present_epoch`: Store epoch of the state that is followed.
/// * `present_workers`: The workers that it names.
/// * `offered`: The newer state. What it says of deaths is said, whatever its epoch.
pub fn is_of_strange_store<'a>(
    present_epoch: u64,
    present_workers: impl IntoIterator<Item = (&'a WorkerUid, Incarnation)>,
    offered: &ClusterState,
) -> bool {
    let epoch = offered.version.map_or(0, |version| version.store_epoch);
    let is_dead = |uid: &WorkerUid, incarnation: Incarnation| {
        offered
            .dead_incarnations
            .iter()
            .any(|dead| dead.worker_uid == *uid.as_str() && incarnation.0 <= dead.incarnation)
    };
    epoch != present_epoch
        && offered.workers.is_empty()
        && present_workers.into_iter().any(|(uid, incarnation)| !is_dead(uid, incarnation))
}

#[cfg(test)]
mod tests {
    use kvist_proto::controller::v1::{ClusterVersion, DeadIncarnation, WorkerEntry};
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn offered(epoch: u64, workers: usize, dead: &[(u8, u64)]) -> ClusterState {
        ClusterState {
            version: Some(ClusterVersion { store_epoch: epoch, revision: 1 }),
            workers: vec![WorkerEntry::default(); workers],
            dead_incarnations: dead
                .iter()
                .map(|(uid, incarnation)| DeadIncarnation { worker_uid: uid.to_string(), incarnation: *incarnation })
                .collect(),
            ..ClusterState::default()
        }
    }

    proptest! {
        #[test]
        fn ignorance_is_a_new_epoch_that_names_nobody_while_somebody_may_live(
            present_epoch in 0_u64..3,
            present in vec((0_u8..4, 1_u64..4), 0..4),
            epoch in 0_u64..3,
            workers in 0_usize..2,
            dead in vec((0_u8..4, 1_u64..4), 0..4),
        ) {
            // Worker by worker, as a person would go through the two states.
            let mut lives_on = 0;
            for (uid, incarnation) in &present {
                let mut closed_up_to = 0;
                for (of, up_to) in &dead {
                    if of == uid {
                        closed_up_to = closed_up_to.max(*up_to);
                    }
                }
                if *incarnation > closed_up_to {
                    lives_on += 1;
                }
            }
            let expected = lives_on > 0 && workers == 0 && epoch != present_epoch;

            let named: Vec<(WorkerUid, Incarnation)> = present
                .iter()
                .map(|(uid, incarnation)| (WorkerUid::from(uid.to_string().as_str()), Incarnation(*incarnation)))
                .collect();
            let state = offered(epoch, workers, &dead);
            let found = is_of_strange_store(present_epoch, named.iter().map(|(uid, start)| (uid, *start)), &state);
            prop_assert_eq!(expected, found);
        }
    }
}
