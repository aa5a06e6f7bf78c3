//! Workers that refuse because more waits there than the router knew of.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use kvist_errors::{Code, from_status};
use kvist_proto::router::v1::{
    self as wire, explain_request::Subject, generate_response::Event, prompt::Form,
    router_service_client::RouterServiceClient,
};
use support::*;
use tonic::transport::Channel;

/// As the documentation says.
const MOST_REFUSALS: usize = 16;

const BUSY: Script = Script::Fail(Code::BusierThanExpected, true);

async fn client(router: &kvist_edge::RouterProcess) -> RouterServiceClient<Channel> {
    let address = router.addresses().grpc_address;
    RouterServiceClient::new(
        limited(Channel::from_shared(format!("http://{address}")).unwrap().connect()).await.unwrap(),
    )
}

fn prompt(number: usize) -> Option<wire::Prompt> {
    Some(wire::Prompt { form: Some(Form::Text(format!("{number:04}").repeat(50))) })
}

/// The code of its failure; none when it is answered.
async fn generate(client: &mut RouterServiceClient<Channel>, number: usize) -> Option<Code> {
    let request =
        wire::GenerateRequest { model: MODEL.to_owned(), prompt: prompt(number), ..wire::GenerateRequest::default() };
    let mut messages = match limited(client.generate(request)).await {
        Ok(messages) => messages.into_inner(),
        Err(status) => return Some(from_status(&status).code),
    };
    let mut has_ended = false;
    loop {
        match limited(messages.message()).await {
            Ok(Some(message)) => has_ended |= matches!(message.event, Some(Event::Finished(_))),
            Ok(None) => {
                assert!(has_ended);
                return None;
            }
            Err(status) => return Some(from_status(&status).code),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_is_placed_anew_until_somebody_takes_it() {
    let workers = [TestWorker::start(0, BUSY).await, TestWorker::start(1, Script::Answer("x")).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let mut client = client(&router).await;
    // Equal targets are drawn from, so that some requests go to the first. Refusals are no attempts: there may be many.
    for number in 0..20 {
        assert_eq!(None, generate(&mut client, number).await);
    }
    let refused = workers[0].engine.requests.lock().clone();
    assert!(!refused.is_empty());
    // Nothing waits at either, so a tenth of a second of prompts may.
    assert!(refused.iter().all(|request| request.most_waiting_tokens == Some(1000)), "{refused:?}");
    assert_eq!(20, workers[1].engine.requests.lock().len());
    assert_eq!(0, router.core().open_reservations());
    // What was refused is in nobody's cache, and is not taken for it.
    for number in 0..20 {
        let dry_run = wire::DryRun { model: MODEL.to_owned(), prompt: prompt(number), ..wire::DryRun::default() };
        let request = wire::ExplainRequest { subject: Some(Subject::DryRun(dry_run)) };
        let record = limited(client.explain(request)).await.unwrap().into_inner().decisions.remove(0);
        let recent: Vec<bool> = record.candidates.iter().map(|candidate| candidate.recent_blocks > 0).collect();
        assert_eq!(vec![false, true], recent);
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_placement_may_not_be_refused_for_what_waits() {
    let workers = [TestWorker::start(0, BUSY).await, TestWorker::start(1, BUSY).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    assert_eq!(Some(Code::BusierThanExpected), generate(&mut client(&router).await, 0).await);
    let requests: Vec<_> = workers.iter().flat_map(|worker| worker.engine.requests.lock().clone()).collect();
    let limited = requests.iter().filter(|request| request.most_waiting_tokens.is_some()).count();
    // One that refuses all the same has another reason, and gets no more than one retry.
    let unlimited = requests.len() - limited;
    assert_eq!(MOST_REFUSALS, limited);
    assert!((1..=2).contains(&unlimited), "{unlimited}");
    assert_eq!(0, router.core().open_reservations());
    router.stop().await;
}
