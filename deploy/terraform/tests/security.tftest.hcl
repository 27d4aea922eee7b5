# Who may connect to whom.

mock_provider "aws" {}

run "only_roles_that_talk" {
  command = plan

  module {
    source = "./modules/security"
  }

  variables {
    name              = "troupe-test"
    vpc_id            = "vpc-0"
    shards            = 3
    tensorboard_cidrs = ["203.0.113.0/24"]
    tags              = {}
  }

  assert {
    condition     = toset(keys(aws_vpc_security_group_ingress_rule.flow)) == toset(["replay-learner", "actor-learner", "evaluator-learner", "learner-replay", "actor-replay"])
    error_message = "nobody connects to actors and evaluator, and the evaluator not to replay"
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.flow["actor-replay"].from_port == 5560 && aws_vpc_security_group_ingress_rule.flow["actor-replay"].to_port == 5562
    error_message = "three shards listen on 5560 to 5562"
  }

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_ingress_rule.tensorboard : rule.from_port == 6006 && rule.to_port == 6006])
    error_message = "the outside reaches TensorBoard and nothing else"
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.tensorboard) == 1
    error_message = "one rule per block"
  }
}
