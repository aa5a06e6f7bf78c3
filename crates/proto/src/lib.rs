//! Generated prost and tonic types of every Kvist proto, and the descriptor set for reflection.
//!
//! Module paths equal proto packages: `kvist.router.v1` is [`router::v1`]. One message is written by hand:
//! [`engine::v1::TokenIds`].
#![allow(missing_docs, clippy::all, unreachable_pub)]

mod token_ids;

pub mod agent {
    pub mod v1 {
        tonic::include_proto!("kvist.agent.v1");
    }
}
pub mod controller {
    pub mod v1 {
        tonic::include_proto!("kvist.controller.v1");
    }
}
pub mod engine {
    pub mod v1 {
        pub use crate::token_ids::TokenIds;

        tonic::include_proto!("kvist.engine.v1");
    }
}
pub mod events {
    pub mod v1 {
        tonic::include_proto!("kvist.events.v1");
    }
}
pub mod kvmaster {
    pub mod v1 {
        tonic::include_proto!("kvist.kvmaster.v1");
    }
}
pub mod router {
    pub mod v1 {
        tonic::include_proto!("kvist.router.v1");
    }
}

/// Encoded `FileDescriptorSet` of all Kvist protos, for server reflection.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
