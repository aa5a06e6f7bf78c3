//! The table and the protos say the same, and what the table promises in words is so.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "functions beside the tests")]

use std::collections::BTreeSet;

use kvist_doors::{PeerRole, allowed_roles, table};
use kvist_proto::DESCRIPTOR_SET;
use prost::Message as _;

/// `service/method` of every service of Kvist.
fn methods() -> BTreeSet<String> {
    let set = prost_types::FileDescriptorSet::decode(DESCRIPTOR_SET).unwrap();
    let mut found = BTreeSet::new();
    for file in set.file.iter().filter(|file| file.package().starts_with("kvist.")) {
        for service in &file.service {
            for method in &service.method {
                found.insert(format!("{}.{}/{}", file.package(), service.name(), method.name()));
            }
        }
    }
    found
}

#[test]
fn every_method_has_one_row_and_every_row_a_method() {
    let rows: Vec<_> = table().map(|row| format!("{}/{}", row.service, row.method)).collect();
    let unique: BTreeSet<_> = rows.iter().cloned().collect();
    assert_eq!(unique.len(), rows.len(), "a method has two rows");
    let methods = methods();
    assert!(methods.len() > 40, "the descriptors hold {} methods", methods.len());
    assert_eq!(methods, unique);
}

#[test]
fn every_method_is_open_to_somebody_and_each_role_once() {
    for row in table() {
        let roles: BTreeSet<_> = row.roles.iter().map(|role| role.name()).collect();
        assert!(!roles.is_empty(), "{}/{}", row.service, row.method);
        assert_eq!(roles.len(), row.roles.len(), "{}/{}", row.service, row.method);
        assert_eq!(Some(row.roles), allowed_roles(&format!("/{}/{}", row.service, row.method)));
    }
}

#[test]
fn the_promises_of_the_security_page_hold() {
    let may = |role: PeerRole| {
        table()
            .filter(|row| row.roles.contains(&role))
            .map(|row| format!("{}/{}", row.service, row.method))
            .collect::<BTreeSet<_>>()
    };
    // A worker calls nobody.
    assert_eq!(BTreeSet::new(), may(PeerRole::Worker));
    // A client reaches routers only.
    assert!(may(PeerRole::Client).iter().all(|method| method.starts_with("kvist.router.v1.")));
    // A router neither starts workers nor changes resources.
    for method in may(PeerRole::Router) {
        assert!(!method.contains("StartWorker") && !method.contains("StopWorker"), "{method}");
        assert!(!method.ends_with("/Apply") && !method.ends_with("/Delete"), "{method}");
        assert!(!method.ends_with("/PutPrefix") && !method.ends_with("/Drain"), "{method}");
    }
    // Only agents register and only operators change resources, be it by way of a controller that does not lead.
    let roles = |method: &str| allowed_roles(&format!("/kvist.controller.v1.ControllerService/{method}"));
    assert_eq!(Some(&[PeerRole::Agent, PeerRole::Controller][..]), roles("Register"));
    for method in ["Apply", "Delete"] {
        assert_eq!(Some(&[PeerRole::Operator, PeerRole::Controller][..]), roles(method));
    }
}
