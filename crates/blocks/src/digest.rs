//! A digest of a set that grows and shrinks at the cost of one addition.

use xxhash_rust::xxh3::xxh3_128;

use crate::{BlockHash, Tier};

/// The sum modulo 2^128 of the fingerprints of the blocks of a set. Order does not matter; two sets that differ have
/// equal digests with a chance of about 2^-128, as long as nobody chooses the hashes against the fingerprint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Digest(pub u128);

impl Digest {
    /// Takes a block into the set; it must not be in it.
    pub fn add(&mut self, hash: BlockHash) {
        self.0 = self.0.wrapping_add(fingerprint(hash));
    }

    /// Takes a block out of the set; it must be in it.
    pub fn remove(&mut self, hash: BlockHash) {
        self.0 = self.0.wrapping_sub(fingerprint(hash));
    }

    /// The digest as it travels: 16 bytes, most significant first.
    #[must_use]
    pub fn to_be_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// Reads what [`Digest::to_be_bytes`] wrote; none for another length.
    #[must_use]
    pub fn from_be_slice(bytes: &[u8]) -> Option<Self> {
        Some(Self(u128::from_be_bytes(bytes.try_into().ok()?)))
    }
}

fn fingerprint(hash: BlockHash) -> u128 {
    xxh3_128(&hash.0.to_le_bytes())
}

/// Count and digest of the blocks of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierDigest {
    /// Which tier.
    pub tier: Tier,
    /// Distinct blocks.
    pub block_count: u64,
    /// Their digest.
    pub digest: Digest,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_digest_depends_on_the_set_alone(mut hashes in prop::collection::hash_set(any::<u64>(), 0..50), gone in any::<u64>()) {
            hashes.remove(&gone);
            let mut forward = Digest::default();
            hashes.iter().for_each(|hash| forward.add(BlockHash(*hash)));
            let mut sorted: Vec<u64> = hashes.into_iter().collect();
            sorted.sort_unstable();
            let mut other = Digest::default();
            other.add(BlockHash(gone));
            sorted.iter().for_each(|hash| other.add(BlockHash(*hash)));
            prop_assert_ne!(forward, other);
            other.remove(BlockHash(gone));
            prop_assert_eq!(forward, other);
            prop_assert_eq!(Some(other), Digest::from_be_slice(&other.to_be_bytes()));
        }
    }
}
