variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the groups."
  type        = string
}

variable "shards" {
  description = "Replay shards; shard i listens on port 5560 + i."
  type        = number
}

variable "learner_peers" {
  description = "Whether several learners share batches."
  type        = bool
}

variable "tensorboard_cidrs" {
  description = "Blocks that may open TensorBoard."
  type        = list(string)
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
}
