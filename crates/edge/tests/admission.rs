//! Doors, breakers and policies of models, over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use http_body_util::BodyExt as _;
use kvist_edge::RouterProcess;
use kvist_errors::{Code, KvistError, from_status};
use kvist_proto::{
    controller::v1::ClusterState,
    events::v1::DecisionRecord,
    router::v1::{self as wire, explain_request::Subject, prompt::Form, router_service_client::RouterServiceClient},
};
use kvist_router::{AdmissionSettings, RouterSettings, RoutingSettings};
use prost::Message as _;
use prost_types::{Struct, value::Kind};
use serde_json::{Value, json};
use support::*;
use tonic::transport::Channel;

type Client = RouterServiceClient<Channel>;

async fn client(router: &RouterProcess) -> Client {
    let address = router.addresses().grpc_address;
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    RouterServiceClient::new(limited(endpoint.connect()).await.unwrap())
}

fn request(prompt: &str, request_id: &str) -> wire::GenerateRequest {
    let prompt = Some(wire::Prompt { form: Some(Form::Text(prompt.to_owned())) });
    wire::GenerateRequest { model: MODEL.to_owned(), prompt, request_id: request_id.to_owned(), ..Default::default() }
}

fn concurrency(running: u32, queued: u32, timeout: &str) -> Value {
    json!({"concurrency": {"maxConcurrentRequests": running, "maxQueuedRequests": queued, "queueTimeout": timeout}})
}

fn with_admission(admission: &Value) -> RouterSettings {
    RouterSettings { admission: AdmissionSettings::from_value(admission).unwrap(), ..settings() }
}

/// A request whose answer is read to its end in the background.
fn ask(client: &Client, request: impl tonic::IntoRequest<wire::GenerateRequest> + Send + 'static) -> Asking {
    let mut client = client.clone();
    tokio::spawn(async move {
        let failed = |status: tonic::Status| from_status(&status);
        let mut messages = client.generate(request).await.map_err(failed)?.into_inner();
        while messages.message().await.map_err(failed)?.is_some() {}
        Ok(())
    })
}

type Asking = tokio::task::JoinHandle<Result<(), KvistError>>;

async fn explain(client: &mut Client, id: &str) -> DecisionRecord {
    let subject = Some(Subject::RequestId(format!("r1-{id}")));
    limited(client.explain(wire::ExplainRequest { subject })).await.unwrap().into_inner().decisions.remove(0)
}

async fn nothing_is_left(router: &RouterProcess) {
    until("nothing is left", || {
        let core = router.core();
        (core.active_requests(), core.open_reservations(), core.taken_places()) == (0, 0, 0)
    })
    .await;
}

// F-09: limit 1, queue 1, three at once: one runs, one waits, one is refused at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_runs_one_waits_and_hears_that_it_does_and_one_is_told_when_to_come_back() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let settings = RouterSettings { keep_alive_interval_ms: 20, ..with_admission(&concurrency(1, 1, "60s")) };
    let router = router(settings, &[&worker]).await;
    let address = router.addresses().http_address;
    let mut client = client(&router).await;
    let first = ask(&client, request("first", "first"));
    worker.next().await;

    let streamed = post("/v1/chat/completions", &chat(json!({"stream": true})));
    let mut body = send(address, streamed).await.into_body();
    let frame = limited(body.frame()).await.unwrap().unwrap();
    assert_eq!(": keep-alive\n\n", std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    assert_eq!((1, 1), (router.status().queued_requests, router.core().open_reservations()));

    let refused = read(send(address, post("/v1/chat/completions", &chat(json!({})))).await).await;
    assert_eq!((429, "queue_full"), (refused.status, refused.json()["error"]["code"].as_str().unwrap()));
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    let status = limited(client.generate(request("x", ""))).await.unwrap_err();
    assert_eq!(tonic::Code::ResourceExhausted, status.code());
    let error = from_status(&status);
    assert_eq!((Code::QueueFull, true), (error.code, error.retry_after.is_some()));
    let prompt = Some(wire::Prompt { form: Some(Form::Text("x".to_owned())) });
    let select = wire::SelectRequest { model: MODEL.to_owned(), prompt, ..Default::default() };
    let status = limited(client.select(select.clone())).await.unwrap_err();
    assert_eq!(Code::QueueFull, from_status(&status).code);

    worker.engine.script(Script::Answer("my turn"));
    worker.engine.release("done");
    limited(first).await.unwrap().unwrap();
    let mut text = String::new();
    while let Some(frame) = limited(body.frame()).await {
        text.push_str(std::str::from_utf8(frame.unwrap().data_ref().unwrap()).unwrap());
    }
    assert_eq!("my turn", content(&text.replace(": keep-alive\n\n", "")));
    let record = explain(&mut client, "first").await;
    assert_eq!(Some(Duration::ZERO), record.queue_duration.map(|wait| wait.try_into().unwrap()));
    nothing_is_left(&router).await;

    // What another gateway was given a target for has a place as well, as long as it holds it.
    let selected = limited(client.select(select)).await.unwrap().into_inner();
    let waiting = ask(&client, request("x", "waited"));
    until("it waits", || router.status().queued_requests == 1).await;
    let release = wire::ReleaseRequest { reservation_id: selected.reservation_id, ..Default::default() };
    limited(client.release(release)).await.unwrap();
    limited(waiting).await.unwrap().unwrap();
    let waited: Duration = explain(&mut client, "waited").await.queue_duration.unwrap().try_into().unwrap();
    assert!(waited > Duration::ZERO);
    nothing_is_left(&router).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_goes_away_or_is_late_leaves_the_queue_and_the_next_one_gets_the_place() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let router = router(with_admission(&concurrency(1, 9, "60s")), &[&worker]).await;
    let address = router.addresses().http_address;
    let client = client(&router).await;
    let first = ask(&client, request("first", ""));
    worker.next().await;
    let queued = |count: usize| {
        let router = &router;
        async move { until("they wait", || router.status().queued_requests == count).await }
    };

    // Clients of both doors go away.
    let http = tokio::spawn(send(address, post("/v1/chat/completions", &chat(json!({})))));
    let grpc = ask(&client, request("x", ""));
    queued(2).await;
    http.abort();
    grpc.abort();
    queued(0).await;
    // The deadline of a client passes.
    let mut hurried = post("/v1/chat/completions", &chat(json!({})));
    hurried.headers_mut().insert("x-request-timeout-ms", "1500".parse().unwrap());
    let answer = read(send(address, hurried).await).await;
    assert_eq!((504, "deadline_exceeded"), (answer.status, answer.json()["error"]["code"].as_str().unwrap()));
    // The wait is as long as it may be. First requests are taken to hold a place for a second.
    let state =
        |revision, admission: &Value| with_policy(&cluster_state(revision, &[&worker]), None, Some(admission.clone()));
    assert!(router.apply_cluster_state(&state(2, &concurrency(1, 9, "50ms"))).unwrap());
    let error = limited(ask(&client, request("x", ""))).await.unwrap().unwrap_err();
    assert_eq!((Code::QueueTimeout, true), (error.code, error.retry_after.is_some()));
    // Another policy counts for those who wait: the place is there.
    assert!(router.apply_cluster_state(&state(3, &concurrency(1, 9, "60s"))).unwrap());
    let waiting = ask(&client, request("x", ""));
    queued(1).await;
    worker.engine.script(Script::Answer("fine"));
    assert!(router.apply_cluster_state(&state(4, &concurrency(2, 9, "60s"))).unwrap());
    limited(waiting).await.unwrap().unwrap();
    worker.engine.release("done");
    limited(first).await.unwrap().unwrap();
    nothing_is_left(&router).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_in_time_is_refused_at_the_door() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let router = router(with_admission(&concurrency(1, 9, "60s")), &[&worker]).await;
    let client = client(&router).await;
    let first = ask(&client, request("first", ""));
    worker.next().await;
    // The mean of what requests hold a place for is not yet known, and taken to be a second.
    let mut hurried = tonic::Request::new(request("x", ""));
    hurried.set_timeout(Duration::from_millis(700));
    let started = std::time::Instant::now();
    let error = limited(ask(&client, hurried)).await.unwrap().unwrap_err();
    assert_eq!(Code::DeadlineExceeded, error.code);
    assert_eq!(Some(Duration::from_secs(1)), error.retry_after, "the door said so, and not a clock");
    assert!(started.elapsed() < Duration::from_millis(700));
    worker.engine.release("done");
    limited(first).await.unwrap().unwrap();
    nothing_is_left(&router).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saturated_targets_make_requests_wait_one_after_the_other() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let mut settings = with_admission(&concurrency(9, 9, "60s"));
    // One of the 64 that run at once is more than a hundredth.
    let filters = json!({"filters": [{"algorithm": "saturation", "parameters": {"threshold": 0.01}}]});
    settings.routing = RoutingSettings::from_value(&filters).unwrap();
    let router = router(settings, &[&worker]).await;
    let client = client(&router).await;
    let mut asking = Vec::new();
    for number in 0..4 {
        asking.push(ask(&client, request(&format!("{number}"), "")));
    }
    for left in (0..4).rev() {
        worker.next().await;
        until("the others wait", || router.status().queued_requests == left).await;
        assert_eq!(1, router.core().open_reservations());
        worker.engine.release("done");
    }
    for one in asking {
        limited(one).await.unwrap().unwrap();
    }
    nothing_is_left(&router).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_is_served_by_priority_and_classes_share() {
    let mut worker = TestWorker::start(0, Script::Hold("")).await;
    let mut admission = concurrency(1, 9, "60s");
    admission["concurrency"]["classes"] =
        json!([{"name": "people", "weight": 1000}, {"name": "batch", "weight": 0.001}]);
    let router = router(with_admission(&admission), &[&worker]).await;
    let client = client(&router).await;
    let mut asking = vec![ask(&client, request("first", "first"))];
    worker.next().await;
    worker.engine.requests.lock().clear();
    let waiting = [("batch-later", "batch", 5), ("batch-sooner", "batch", 1), ("person", "people", 9)];
    for (count, (id, class, priority)) in (1..).zip(waiting) {
        let mut request = tonic::Request::new(wire::GenerateRequest { priority, ..request("x", id) });
        request.metadata_mut().insert("kvist-class", class.parse().unwrap());
        asking.push(ask(&client, request));
        until("it waits", || router.status().queued_requests == count).await;
    }
    worker.engine.script(Script::Answer("fine"));
    worker.engine.release("done");
    for one in asking {
        limited(one).await.unwrap().unwrap();
    }
    let served: Vec<String> = worker.engine.requests.lock().iter().map(|one| one.request_id.clone()).collect();
    assert_eq!(vec!["r1-person", "r1-batch-sooner", "r1-batch-later"], served);
    nothing_is_left(&router).await;
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_fails_is_left_alone_and_a_busy_one_or_a_wrong_request_is_not_its_fault() {
    let workers =
        [TestWorker::start(0, Script::Answer("fine")).await, TestWorker::start(1, Script::Answer("fine")).await];
    let mut settings = settings();
    settings.routing = RoutingSettings::from_value(&json!({"scorer": {"algorithm": "round_robin"}})).unwrap();
    let router = router(settings, &[&workers[0], &workers[1]]).await;
    let mut client = client(&router).await;
    for neutral in [Script::Refuse("sampling.seed"), Script::Fail(Code::Overloaded, false)] {
        workers[0].engine.script(neutral);
        for _ in 0..14 {
            let _ = limited(ask(&client, request("x", ""))).await.unwrap();
        }
    }
    workers[0].engine.script(Script::Fail(Code::EngineFailed, false));
    workers[0].engine.requests.lock().clear();
    let mut failures = 0;
    for _ in 0..20 {
        failures += usize::from(limited(ask(&client, request("x", ""))).await.unwrap().is_err());
    }
    assert_eq!((5, 5), (failures, workers[0].engine.requests.lock().len()), "the fifth opened the breaker");
    limited(ask(&client, request("x", "after"))).await.unwrap().unwrap();
    let record = explain(&mut client, "after").await;
    let reasons: Vec<&str> = record.candidates.iter().map(|one| one.filtered_reason.as_str()).collect();
    assert_eq!(vec!["breaker_open", ""], reasons);
    let targets = limited(client.list_targets(wire::ListTargetsRequest {})).await.unwrap().into_inner().targets;
    assert_eq!("breaker_open", targets[0].excluded_reason);

    // The other one fails, too: one of both is tried all the same, and answers when it is well again.
    workers[1].engine.script(Script::Fail(Code::EngineFailed, false));
    for _ in 0..12 {
        assert_eq!(Code::EngineFailed, limited(ask(&client, request("x", ""))).await.unwrap().unwrap_err().code);
    }
    for worker in &workers {
        worker.engine.script(Script::Answer("fine"));
    }
    limited(ask(&client, request("x", ""))).await.unwrap().unwrap();
    nothing_is_left(&router).await;
    router.stop().await;
}

fn wire_value(value: &Value) -> prost_types::Value {
    let kind = match value {
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
        Value::Array(items) => {
            Kind::ListValue(prost_types::ListValue { values: items.iter().map(wire_value).collect() })
        }
        Value::Object(_) => Kind::StructValue(wire_struct(value)),
        Value::Bool(_) | Value::Null => panic!("no policy has it"),
    };
    prost_types::Value { kind: Some(kind) }
}

fn wire_struct(value: &Value) -> Struct {
    let fields = value.as_object().unwrap();
    Struct { fields: fields.iter().map(|(name, value)| (name.clone(), wire_value(value))).collect() }
}

fn with_policy(state: &[u8], routing: Option<Value>, admission: Option<Value>) -> Vec<u8> {
    let mut state = ClusterState::decode(state).unwrap();
    state.models[0].routing = routing.as_ref().map(wire_struct);
    state.models[0].admission = admission.as_ref().map(wire_value);
    state.encode_to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policy_of_a_model_counts_for_the_next_request_and_a_wrong_one_changes_nothing() {
    let worker = TestWorker::start(0, Script::Answer("fine")).await;
    let router = router(settings(), &[&worker]).await;
    let mut client = client(&router).await;
    let session = json!({"scorers": [{"algorithm": "session", "parameters": {"loadBound": 2}}]});
    let of_tomorrow = json!({"scorers": [{"algorithm": "clairvoyance"}]});
    let steps = [
        (None, "cost, max"),
        (Some(session), "session, max"),
        (Some(of_tomorrow), "session, max"),
        (Some(json!({"preset": "foretoken"})), "kv_least_loaded, gamble_sampling"),
        (None, "cost, max"),
    ];
    for (revision, (routing, policy)) in (2..).zip(steps) {
        let state = with_policy(&cluster_state(revision, &[&worker]), routing, None);
        assert!(router.apply_cluster_state(&state).unwrap());
        let id = format!("at-{revision}");
        let mut request = request("x", &id);
        request.session_id = "conversation".to_owned();
        limited(ask(&client, request)).await.unwrap().unwrap();
        assert_eq!(policy, explain(&mut client, &id).await.policy);
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_stays_on_its_target_by_whatever_door_it_comes() {
    let workers =
        [TestWorker::start(0, Script::Answer("fine")).await, TestWorker::start(1, Script::Answer("fine")).await];
    let mut settings = settings();
    settings.routing = RoutingSettings::from_value(&json!({"scorer": {"algorithm": "session"}})).unwrap();
    let router = router(settings, &[&workers[0], &workers[1]]).await;
    let client = client(&router).await;
    let mut homes = [0, 0];
    for session in 0..16 {
        for worker in &workers {
            worker.engine.requests.lock().clear();
        }
        let id = format!("session-{session}");
        let in_field = wire::GenerateRequest { session_id: id.clone(), ..request("x", "") };
        let mut in_metadata = tonic::Request::new(request("x", ""));
        in_metadata.metadata_mut().insert("kvist-session", id.parse().unwrap());
        limited(ask(&client, in_field)).await.unwrap().unwrap();
        limited(ask(&client, in_metadata)).await.unwrap().unwrap();
        for header in ["kvist-session", "x-session-id"] {
            let mut request = post("/v1/chat/completions", &chat(json!({})));
            request.headers_mut().insert(header, id.parse().unwrap());
            assert_eq!(200, read(send(router.addresses().http_address, request).await).await.status);
        }
        let counts = [0, 1].map(|number| workers[number].engine.requests.lock().len());
        assert!(counts.contains(&4), "{counts:?}");
        homes[usize::from(counts[1] == 4)] += 1;
    }
    assert!(homes[0] > 0 && homes[1] > 0, "{homes:?}");
    router.stop().await;
}

// F-08: what is scraped before and after adds up to the requests between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_and_their_errors_are_counted_once_each() {
    let workers = [TestWorker::start(0, Script::Answer("ok")).await, TestWorker::start(1, Script::Answer("ok")).await];
    let router = router(settings(), &[&workers[0], &workers[1]]).await;
    let client = client(&router).await;
    for _ in 0..6 {
        limited(ask(&client, request("x", ""))).await.unwrap().unwrap();
    }
    // No engine of the test has log-probabilities, so the filters leave nobody.
    let refused = post("/v1/chat/completions", &chat(json!({"logprobs": true})));
    assert_eq!(400, read(send(router.addresses().http_address, refused).await).await.status);
    nothing_is_left(&router).await;
    let metrics = read(send(router.addresses().admin_address, get("/metrics")).await).await.body;
    let number = |series: &str| -> f64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in {metrics}")).parse().unwrap()
    };
    for (series, expected) in [
        (r#"kvist_router_selections_total{outcome="selected"}"#, 6.0),
        (r#"kvist_router_selections_total{outcome="no_matching_target"}"#, 1.0),
        (r#"kvist_router_selections_total{outcome="saturated"}"#, 0.0),
        (r#"kvist_router_candidates_total{stage="available"}"#, 14.0),
        (r#"kvist_router_candidates_total{stage="filtered"}"#, 2.0),
        (r#"kvist_router_candidates_total{stage="selectable"}"#, 12.0),
        // The engines of the test say that one token was cached, of which nobody knew.
        (r#"kvist_router_hit_tokens_total{kind="chosen"}"#, 0.0),
        (r#"kvist_router_hit_tokens_total{kind="delivered"}"#, 6.0),
        (r#"kvist_router_cached_error_tokens_count{direction="more"}"#, 6.0),
        (r#"kvist_router_cached_error_tokens_sum{direction="more"}"#, 6.0),
    ] {
        assert_eq!(expected, number(series), "{series}");
    }
    let errors = ["later", "earlier"]
        .map(|direction| number(&format!("kvist_router_first_token_error_seconds_count{{direction=\"{direction}\"}}")));
    assert_eq!(6.0, errors.iter().sum::<f64>());
    router.stop().await;
}
