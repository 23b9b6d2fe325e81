export const ESSAY = {};
